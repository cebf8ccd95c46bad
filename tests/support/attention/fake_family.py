"""A third family of kernels: what a new folder next to ``portable`` and ``hopper`` defines, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from flash_train.attention import AttentionSpec, attention
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.families import FAMILIES, KernelFamily

FAKE = KernelFamily(name="fake", title="the fake kernels", module=__name__)
ran: list[str] = []


@contextmanager
def registered(family: KernelFamily = FAKE) -> Iterator[list[str]]:
    """Inside it, the family is the registry's first entry. Gives a list of the directions that it ran."""
    ran.clear()
    with patch.dict(FAMILIES, {family.name: family, **FAMILIES}, clear=True):
        yield ran


def refusal(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    return "it has no softcap" if call.softcap else None


def backward_refusal(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    return refusal(q, k, v, call) or ("it has no gradient of sinks" if call.sinks is not None else None)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    ran.append("forward")
    spec = AttentionSpec(scale=call.scale)
    out, lse = attention(q, k, v, spec, sinks=call.sinks, backend="reference", return_lse=True)
    return out.contiguous(), lse.contiguous()


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    needs_slopes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    ran.append("backward")
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again = attention(*leaves, AttentionSpec(scale=call.scale), backend="reference")
    dq, dk, dv = torch.autograd.grad(again, leaves, dout)
    return dq, dk, dv, None, None
