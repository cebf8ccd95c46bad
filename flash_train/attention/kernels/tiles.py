"""Tile shapes: how much of the problem one program holds, by architecture, head dimension and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys per step, warps per program and stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of one call's kernels."""

    forward: Tile
    dkdv: Tile
    dq: Tile


#: the interpreter's cost is per program and step, not per element, and it must still cross tile boundaries at n <= 256
INTERPRETER = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))

#: 16-bit inputs on sm_90 and sm_100: 227 KiB of shared memory, matrix units fed from it
_LARGE = {
    16: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    32: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(128, 128, 8, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(128, 32, 8, 3)),
}

#: with dropout the mask takes registers and shared memory, so that smaller steps win
_LARGE_DROPOUT = _LARGE | {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(32, 128, 8, 3), Tile(128, 64, 8, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
}

#: without a diagonal to mask, two small programs on a processor hide more than one large one
_LARGE_DROPOUT_FULL = _LARGE_DROPOUT | {
    128: Tiles(Tile(128, 64, 8, 3), Tile(32, 64, 4, 3), Tile(128, 64, 8, 3)),
}

#: 16-bit inputs elsewhere: within the 99 KiB of a consumer card
_SMALL = {
    16: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    32: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Tiles(Tile(128, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: Tiles(Tile(64, 16, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
}

#: fp32 inputs, everywhere: twice the bytes, and products of three tf32 passes
_FLOAT32 = {
    16: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    32: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    64: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: Tiles(Tile(64, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
    256: Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


def block_d(head_dim: int) -> int:
    """Columns of a tile: the head dimension rounded up to a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def choose_tiles(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: bool, causal: bool) -> Tiles:
    """The shipped tiles for this device; the interpreter's on a CPU."""
    if device.type == "cpu":
        return INTERPRETER
    return tiles_for(torch.cuda.get_device_capability(device), dtype, head_dim, dropout, causal)


def tiles_for(capability: tuple[int, int], dtype: torch.dtype, head_dim: int, dropout: bool, causal: bool) -> Tiles:
    """The shipped tiles for a compute capability, whether or not such a device is present."""
    columns = block_d(head_dim)
    if dtype == torch.float32:
        return _FLOAT32[columns]
    if capability in ((9, 0), (10, 0)):
        if dropout:
            return (_LARGE_DROPOUT if causal else _LARGE_DROPOUT_FULL)[columns]
        return _LARGE[columns]
    return _SMALL[columns]
