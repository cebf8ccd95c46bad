"""Attention over a shared row as one PyTorch operator, with its gradient.

The whole forward of a rank, all groups of heads with their communication, is one operator. So a policy of selective
checkpointing that keeps the operator's results repeats neither attention nor communication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flash_train.attention.autograd import is_observed
from flash_train.attention.flops import attention_flops
from flash_train.attention.masks import Causal, Window
from flash_train.attention.parallel import gather, ulysses
from flash_train.attention.parallel.group_attention import GroupAttention
from flash_train.attention.parallel.shared_row import SharedRow, row_of
from flash_train.attention.spec import AttentionSpec


class Settings(NamedTuple):
    """The plain values of a call. The mask follows from the row's plan.

    ``backend`` is a name that ``resolve_backend`` returned; ``entry`` and ``head`` are ``RngState``'s.
    """

    method: str
    backend: str
    scale: float
    softcap: float
    dropout: float
    entry: int
    head: int


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, state: Tensor | None, row: SharedRow, settings: Settings
) -> Tensor:
    """Compute this rank's output, differentiable; ``state`` is dropout's seed and offset, int64 (2,)."""
    return _SharedAttention.apply(q, k, v, sinks, state, row, settings)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, state: Tensor | None, row: SharedRow, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return out, and the log-sum-exp for the backward."""
    calls = _calls(q.shape[1], state, row, settings)
    return (gather if settings.method == "gather" else ulysses).forward(q, k, v, sinks, calls, row)


def _calls(heads: int, state: Tensor | None, row: SharedRow, settings: Settings) -> GroupAttention:
    mask = Causal() if row.plan.window is None else Window(row.plan.window, 0)
    spec = AttentionSpec(mask, settings.scale, settings.softcap, settings.dropout)
    entry, head = settings.entry, settings.head
    if settings.method == "ulysses":
        head += ulysses.first_head(heads, row)
    return GroupAttention(spec, settings.backend, state, entry, head)


def _operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, state: Tensor | None, row: int, *settings: Any
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, sinks, state, row_of(row), Settings(*settings))


shared_attention_forward = torch.library.custom_op(
    "flash_train::shared_attention_forward",
    _operator,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? state, int row, str method, str backend, "
    "float scale, float softcap, float dropout, int entry, int head) -> (Tensor, Tensor)",
)


@register_flop_formula(torch.ops.flash_train.shared_attention_forward, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, sinks: Any, state: Any, row: int, method: str, *_: Any, **__: Any) -> int:
    plan, rank = row_of(row).plan, row_of(row).rank
    pairs, heads = (plan.pairs[rank], q.shape[1]) if method == "gather" else (sum(plan.pairs), q.shape[1] // plan.ranks)
    return attention_flops(pairs, heads, q.shape[2], v.shape[2])


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        state: Tensor | None,
        row: SharedRow,
        settings: Settings,
    ) -> Tensor:
        if is_observed(q):  # other calls bypass torch.library, which takes long
            out, lse = shared_attention_forward(q, k, v, sinks, state, row.handle, *settings)
        else:
            out, lse = _forward(q, k, v, sinks, state, row, settings)
        ctx.save_for_backward(q, k, v, out, lse, sinks, state)
        ctx.row, ctx.settings = row, settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks, state = ctx.saved_tensors
        calls = _calls(q.shape[1], state, ctx.row, ctx.settings)
        run = (gather if ctx.settings.method == "gather" else ulysses).backward
        return (*run(dout, q, k, v, out, lse, sinks, calls, ctx.row), None, None, None)
