"""The attention call for one group of heads, and its gradient, by any backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_train.attention.autograd import attention_backward, is_observed
from flash_train.attention.dropout import EntryOrigins, RngState
from flash_train.attention.functional import attention, operands_of
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.families import is_own
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  #: of q, k, v and the sinks


@dataclass(frozen=True)
class GroupAttention:
    """What the calls for all groups of heads have in common.

    Attributes:
        backend: a name that ``resolve_backend`` returned.
        state: dropout's seed and offset, int64 (2,); None without dropout.
        entry, head: place of the call's first entry and of head 0 in the dropout mask.
        origins: the entries' places in the dropout mask, if they are pieces.
    """

    spec: AttentionSpec
    packing: Packing
    backend: str
    state: Tensor | None
    entry: int
    head: int
    origins: EntryOrigins | None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, head: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend, without gradients; ``head`` is the number of q's first head.

        Returns:
            the output, written to ``out`` if that is given; the log-sum-exp (heads, total_q), which is empty if the
            backend's backward does not read it.
        """
        if not is_own(self.backend):
            found = self._run(q, k, v, sinks, head)
            return found if out is None else out.copy_(found), q.new_empty((q.shape[1], 0), dtype=torch.float32)
        from flash_train.attention.kernels.select import forward_of

        call = self._call(q, k, sinks, head)
        return forward_of(self.backend, q, k, v, call)(q, k, v, call, out)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        head: int,
    ) -> Gradients:
        """Compute the gradients; the backends in PyTorch run the forward again."""
        if not is_own(self.backend):
            return self._differentiate(dout, q, k, v, sinks, head)
        call = self._call(q, k, sinks, head)
        if is_observed(dout):
            dq, dk, dv, _, dsinks = attention_backward(
                dout, None, q, k, v, out, lse, *call.arguments, self.backend, False
            )
        else:
            from flash_train.attention.kernels.select import backward_of

            run = backward_of(self.backend, q, k, v, call)
            dq, dk, dv, _, dsinks = run(dout, None, q, k, v, out, lse, call)
        return dq, dk, dv, None if sinks is None else dsinks

    def _call(self, q: Tensor, k: Tensor, sinks: Tensor | None, head: int) -> Call:
        origin = (self.entry, self.head + head, 0, 0)
        return operands_of(q, k, self.spec, self.packing, self.state, origin, None, sinks, self.origins).readable()

    def _run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, head: int) -> Tensor:
        rng = None
        if self.state is not None:
            rng = RngState(self.state[0], self.state[1], entry=self.entry, head=self.head + head, entries=self.origins)
        return attention(q, k, v, self.spec, packing=self.packing, rng=rng, sinks=sinks, backend=self.backend)

    def _differentiate(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, head: int
    ) -> Gradients:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):  # the forward has cast q, k and v
            out = self._run(leaves[0], leaves[1], leaves[2], None if sinks is None else leaves[3], head)
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
        return dq, dk, dv, dsinks[0] if dsinks else None
