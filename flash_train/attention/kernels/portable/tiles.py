"""Tile shapes: how many queries and keys one program holds.

The table is ``tiles.json``. It has a row for each shared-memory limit (KiB per program), number of bits of the inputs,
head dimension and variant of the call. Some rows also name the major compute capability that they are for.
``scripts/tune_attention.py``
measures rows and writes them; nothing is tuned at run time.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from flash_train.attention.kernels.compiler_options import FEW_REGISTERS
from flash_train.attention.kernels.gpu import major_of, shared_memory
from flash_train.attention.kernels.tile_sizes import Tile, block_d

TABLE = Path(__file__).with_name("tiles.json")
#: major compute capabilities with separate rows. 10, data-center Blackwell, keeps accumulators in tensor memory, and
#: they pass through shared memory on their way to registers.
OWN_ROWS = (10,)
VARIANTS = ("causal", "full", "dropout-causal", "dropout-full", "terms")


@dataclass(frozen=True)
class Tiles:
    """The tiles of one call's kernels. With a tile ``dv``, dV has a separate launch and ``dkdv`` computes dK only."""

    forward: Tile
    dkdv: Tile
    dq: Tile
    dv: Tile | None = None

    def within(self, block_m: int, block_n: int) -> Tiles:
        forward, dkdv, dq = (tile.within(block_m, block_n) for tile in (self.forward, self.dkdv, self.dq))
        return Tiles(forward, dkdv, dq, None if self.dv is None else self.dv.within(block_m, block_n))


#: the interpreter's cost depends on programs and steps, not elements; tests must cross tile boundaries at n <= 256
INTERPRETER = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))


def variant_of(causal: bool, dropout: bool, terms: bool) -> str:
    """Return the name of the variant in the table.

    Element-wise terms decide alone: they may load a number for each pair, and leave less room than anything else.
    """
    if terms:
        return "terms"
    return ("dropout-" if dropout else "") + ("causal" if causal else "full")


def choose_tiles(device: torch.device, dtype: torch.dtype, head_dim: int, variant: str) -> Tiles:
    """Return the table's tiles for this device; on a CPU, the interpreter's."""
    if device.type == "cpu":
        return INTERPRETER
    return tiles_for(shared_memory(device), dtype, head_dim, variant, major_of(device))


def decode_tile(device: torch.device, dtype: torch.dtype, head_dim: int, rows: int) -> Tile:
    """Return the decode kernel's tile for ``rows`` rows (queries times heads of a group).

    It is chosen for the number of bytes in flight.
    """
    if device.type == "cpu":
        return Tile(16, 32, 4, 1)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    bytes_per_key = block_d(head_dim) * dtype.itemsize
    return Tile(block_m, 64 if bytes_per_key <= 256 else 32 if bytes_per_key <= 512 else 16, 4, 3)


@functools.cache
def tiles_for(shared: int, dtype: torch.dtype, head_dim: int, variant: str, major: int) -> Tiles:
    """Return the row with the largest shared-memory limit within ``shared`` bytes; prefer a row for this chip."""
    bits = 8 * dtype.itemsize
    rows = [
        row
        for row in load_table()
        if (row["bits"], row["head_dim"], row["variant"]) == (bits, block_d(head_dim), variant)
        and row["shared"] * 1024 <= shared
        and row.get("major", major) == major
    ]
    if not rows:
        raise ValueError(f"no tiles for {shared} bytes of shared memory: the kernels need {99 * 1024}")
    row = max(rows, key=lambda row: (row["shared"], "major" in row))
    return Tiles(**{name: Tile(*row[name]) for name in ("forward", "dkdv", "dq", "dv") if name in row})


@functools.cache
def load_table() -> list[dict]:
    return json.loads(TABLE.read_text())


def constants(q: Tensor, head_dim_v: int, group: int, tile: Tile) -> dict[str, Any]:
    """Return the compile-time arguments and the compiler's options of a portable kernel."""
    head_dim = q.shape[-1]
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_DV": block_d(head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": "ieee" if q.device.type == "cpu" else "bf16x6",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **(FEW_REGISTERS if q.dtype.itemsize == 2 and head_dim % 16 == 0 else {}),
    }
