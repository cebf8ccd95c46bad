"""Hopper's kernels in the Gluon emulator: ``backend="hopper"`` on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from flash_train.attention import backends
from flash_train.attention.kernels import families
from flash_train.attention.kernels.hopper import dropout, packed16
from flash_train.attention.kernels.hopper import launch as hopper
from flash_train.attention.kernels.hopper.backward.dq_accumulator import ACQUIRED, WRITTEN, WRITTEN_BUT_TWO
from flash_train.attention.kernels.hopper.backward.fused import hopper_backward
from flash_train.attention.kernels.hopper.online_softmax import WARP_EXCEEDS
from flash_train.attention.kernels.hopper.pipeline import ONCE
from flash_train.attention.kernels.launch import Launch
from flash_train.attention.kernels.launch_options import launch_options
from tests.support import gluon

COMPILER_OPTIONS = ("num_stages", "maxnreg")


@contextmanager
def hopper_on_cpu(seed: int = 0, programs: int = 3) -> Iterator[list[str]]:
    """Inside, launches of Hopper's kernels run in the emulator. Yields a list of the names of the kernels that ran.

    All launches share one task counter, as on a stream: each must leave it at 0.

    Args:
        seed: determines the order of partitions and copies.
        programs: number of emulated processors.
    """
    ran: list[str] = []
    counter = torch.zeros(1, dtype=torch.int32)

    def start(launch: Launch) -> None:
        ran.append(launch.kernel.__name__)
        constants = {name: value for name, value in launch.constants.items() if name not in COMPILER_OPTIONS}
        gluon.launch(
            launch.kernel, launch.grid, *launch.arguments, seed=seed, assembly=ASSEMBLY,
            in_order=launch.kernel is hopper_backward, **constants,
        )  # fmt: skip

    make_backward_buffers = hopper.make_backward_buffers

    def poisoned(*args, **options) -> hopper.BackwardBuffers:
        sums = make_backward_buffers(*args, **options)
        for x in (sums.delta, sums.lse2, sums.dq):
            if x is not None:
                x.fill_(float("nan"))
        if sums.counters is not None:
            sums.counters.fill_(1000)
        return sums

    with (
        patch.object(Launch, "start", start),
        patch.object(backends, "flash_unavailable", lambda device, dtype, head_dim: None),
        patch.object(families, "device_unavailable", lambda *_: None),
        launch_options(processors=programs),
        patch.object(hopper, "_work_tile_counter", lambda q: counter),
        patch.object(hopper, "make_backward_buffers", poisoned),
    ):
        yield ran
    assert counter.item() == 0


def _keep(transposed: bool):
    """``dropout.apply_dropout``, on fragments [a, b, c, d, A, B, C, D] and flags of even and odd columns."""

    def keep(x: np.ndarray, even: np.ndarray, odd: np.ndarray) -> np.ndarray:
        _, b, _, _, _, B, _, D = np.ix_(*map(np.arange, x.shape))
        return np.where(_flag(np.where(D == 1, odd, even), b, B, transposed), x, np.zeros_like(x))

    return keep


def _keep_pairs(transposed: bool):
    """``dropout.apply_dropout_packed``, on fragments [a, b, c, d, A, B, C]."""

    def keep(x: np.ndarray, even: np.ndarray, odd: np.ndarray) -> np.ndarray:
        _, b, _, _, _, B, _ = np.ix_(*map(np.arange, x.shape))
        low = np.where(_flag(even, b, B, transposed), 0xFFFF, 0)
        high = np.where(_flag(odd, b, B, transposed), -0x10000, 0)
        return x & (low | high).astype(np.int32)

    return keep


def _flag(flags: np.ndarray, b: np.ndarray, B: np.ndarray, transposed: bool) -> np.ndarray:
    byte = 2 * B + b if transposed else 2 * b + B
    return (flags >> (8 * byte + 7).astype(flags.dtype)) & 1


def _pack(dtype: torch.dtype):
    """``packed16.pack`` of even and odd columns."""

    def bits(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).view(torch.int16).numpy().astype(np.int32)

    return lambda even, odd: (bits(even) & 0xFFFF) | (bits(odd) << 16)


def _below(words: np.ndarray, added: np.ndarray, low: np.ndarray) -> np.ndarray:
    carry = (words & 0x7F7F7F7F) + low
    return ~((words & added) | (words & carry) | (added & carry))


def _exceeds(sums: np.ndarray) -> np.ndarray:
    """Return whether any of a warp's sixteen rows exceeds the limit."""
    exceeds = (~(sums <= 2.0**15)).reshape(4, 16, 8).any((1, 2), keepdims=True)
    return np.broadcast_to(exceeds, (4, 16, 8)).reshape(sums.shape).astype(np.int32)


ASSEMBLY = {
    WARP_EXCEEDS.value: _exceeds,
    dropout.BELOW.value: _below,
    dropout.SWAP.value: lambda flags: np.flip(flags, 2),  # along d of [a, c, d, A, C]
    **{code.value: lambda x: x for code in (ONCE, WRITTEN, WRITTEN_BUT_TWO, ACQUIRED)},
    packed16.rounding(gl.bfloat16): _pack(torch.bfloat16),
    packed16.rounding(gl.float16): _pack(torch.float16),
    **{dropout.select_packed(transposed): _keep_pairs(transposed) for transposed in (False, True)},
    **{dropout.select_fp32(transposed): _keep(transposed) for transposed in (False, True)},
}
