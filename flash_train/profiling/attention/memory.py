"""The memory of attention by itself, and its growth with the length of a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from flash_train.attention import attention
from flash_train.profiling.ablation.plot import fit_exponent
from flash_train.profiling.attention.cases import Case
from flash_train.profiling.memory.allocations import Recording, moments

HEADS, HEAD_DIM = 16, 128  #: the shape of the model 1b3
FITTED_FROM = 8192  #: tokens; in shorter rows, parts that grow differently are too large a share


def one_row(length: int) -> Case:
    """Return a causal call as the model makes it: packed, with one document."""
    return Case(HEAD_DIM, HEADS, HEADS, 0, True, lengths=(length,))


def own_bytes(backend: str, length: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> int:
    """Measure the peak bytes of a forward and backward, without q, k, v and the gradient of the output.

    They include the results: the output, its log-sum-exp, and the gradients of q, k and v.
    """
    case = one_row(length)
    q, k, v = case.inputs(device, dtype)
    spec, packing, dout = case.spec(device), case.packing(device), torch.randn_like(q)

    def call() -> None:
        attention(q, k, v, spec, packing=packing, backend=backend).backward(dout)

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    recording = Recording(device, ())
    with recording.recording(nn.Module()):
        call()
    held = moments(recording.allocations(), lambda _: "own", recording.scopes)
    return max(moment.total for _, moment in held)


def exponents(sizes: Mapping[str, Mapping[int, int]]) -> dict[str, float | None]:
    """Fit the exponent p of size ~ length^p, by backend; None if fewer than two lengths are FITTED_FROM or more."""
    found = {}
    for backend, by_length in sizes.items():
        long = {n: size for n, size in by_length.items() if n >= FITTED_FROM}
        found[backend] = fit_exponent(list(long), list(long.values()))
    return found
