"""The sizes of a tile: how many queries and keys one program holds, and how many columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys per step, warps per program and stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def within(self, block_m: int, block_n: int) -> Tile:
        """This tile, cut to sizes that divide the blocks of a map."""
        return replace(self, block_m=min(self.block_m, block_m), block_n=min(self.block_n, block_n))


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. ``triton.cdiv``, which kernels can call, too, takes ten times as long."""
    return -(-a // b)


@functools.cache
def block_d(head_dim: int) -> int:
    """Columns of a tile: the head dimension rounded up to a power of two, at least 64.

    The mathematics would allow fewer columns. But for compute capability 9.0, Triton 3.6 and 3.7 misplace a tile of 16
    or 32 columns of 16 bits that passes through registers on its way to shared memory, as a tile of unaligned rows
    does: products are wrong, or an address is illegal. With 64 columns the exponentials take longer than the products
    in any case.
    """
    return max(64, triton.next_power_of_2(head_dim))
