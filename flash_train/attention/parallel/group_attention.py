"""The attention call for one group of heads, and its gradient, by any backend."""

from __future__ import annotations

from collections.abc import Sequence
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
class Entries:
    """The packed entries of a call.

    Attributes:
        origins: the entries' places in the dropout mask. None: they follow the mask's entry ``GroupAttention.entry``.
    """

    packing: Packing
    origins: EntryOrigins | None = None

    def from_entry(self, entry: int) -> Entries:
        """Return the same with the first entry's place moved by this many entries of the mask."""
        if entry == 0 or self.origins is None:
            return self
        first = self.origins.first.clone()
        first[:, 0] += entry
        return Entries(self.packing, EntryOrigins(first, self.origins.aligned))


@dataclass(frozen=True)
class GroupAttention:
    """What the calls of a layer have in common.

    Attributes:
        backend: a name that ``resolve_backend`` returned.
        state: dropout's seed and offset, int64 (2,); None without dropout.
        entry, head: place of the row's first document and of head 0 in the dropout mask.
    """

    spec: AttentionSpec
    backend: str
    state: Tensor | None
    entry: int
    head: int

    def forward(
        self,
        entries: Entries,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        head: int,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend, without gradients; ``head`` is the number of q's first head.

        Returns:
            the output, written to ``out`` if that is given; the log-sum-exp (heads, total_q), which is empty if the
            backend's backward does not read it.
        """
        if not is_own(self.backend):
            found = self._run(entries, q, k, v, sinks, head)
            return found if out is None else out.copy_(found), q.new_empty((q.shape[1], 0), dtype=torch.float32)
        from flash_train.attention.kernels.select import forward_of

        call = self._call(entries, q, k, sinks, head)
        return forward_of(self.backend, q, k, v, call)(q, k, v, call, out)

    def backward(
        self,
        entries: Entries,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        head: int,
        into: Sequence[Tensor | None] = (None, None, None),
    ) -> Gradients:
        """Compute the gradients; the backends in PyTorch run the forward again.

        Returns:
            dq, dk and dv, written ``into`` the tensors that are given, and the gradient of the sinks.
        """
        dsinks: Tensor | None
        if not is_own(self.backend):
            *found, dsinks = self._differentiate(entries, dout, q, k, v, sinks, head)
        else:
            call = self._call(entries, q, k, sinks, head)
            if is_observed(dout):
                arguments = (dout, None, q, k, v, out, lse, *call.arguments, self.backend, False)
                *found, _, dsinks = attention_backward(*arguments)
            else:
                from flash_train.attention.kernels.select import backward_of

                usable = [x if x is not None and x.is_contiguous() and x.data_ptr() % 16 == 0 else None for x in into]
                run = backward_of(self.backend, q, k, v, call)
                *found, _, dsinks = run(dout, None, q, k, v, out, lse, call, False, usable)
        for number, (x, given) in enumerate(zip(found, into, strict=True)):
            if given is not None and x is not given:
                found[number] = given.copy_(x)
        dq, dk, dv = found
        return dq, dk, dv, None if sinks is None else dsinks

    def _call(self, entries: Entries, q: Tensor, k: Tensor, sinks: Tensor | None, head: int) -> Call:
        origin = (0 if entries.origins is not None else self.entry, self.head + head, 0, 0)
        origins = None if self.state is None else entries.origins
        return operands_of(q, k, self.spec, entries.packing, self.state, origin, None, sinks, origins).contiguous()

    def _run(self, entries: Entries, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, head: int) -> Tensor:
        rng = None
        if self.state is not None:
            entry = 0 if entries.origins is not None else self.entry
            rng = RngState(self.state[0], self.state[1], entry=entry, head=self.head + head, entries=entries.origins)
        return attention(q, k, v, self.spec, packing=entries.packing, rng=rng, sinks=sinks, backend=self.backend)

    def _differentiate(
        self, entries: Entries, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, head: int
    ) -> Gradients:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):  # the forward has cast q, k and v
            out = self._run(entries, leaves[0], leaves[1], leaves[2], None if sinks is None else leaves[3], head)
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
        return dq, dk, dv, dsinks[0] if dsinks else None
