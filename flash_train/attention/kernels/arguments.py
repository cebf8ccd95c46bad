"""Convert a call to the kernels' arguments, and launch a kernel with them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.index_tensors import readable
from flash_train.attention.kernels.call import UNUSED, Call
from flash_train.attention.kernels.device import mask as device_mask
from flash_train.attention.kernels.device.mask import MaskRule
from flash_train.attention.kernels.device.philox import Dropout
from flash_train.attention.kernels.device.score import Score
from flash_train.attention.kernels.device.tile import Rows, Strided
from flash_train.attention.kernels.portable.tiles import Tile, block_d
from flash_train.attention.masks import device_term

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and its arguments. It can be run, or only compiled.

    ``first`` are launches that must run before it. ``made`` are tensors among the arguments that were allocated for
    this launch, which fills them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    first: tuple[Launch, ...] = ()
    made: tuple[Tensor, ...] = ()

    def run(self) -> None:
        for launch in self.first:
            launch.start()
        self.start()

    def start(self) -> Any:
        """Launch this kernel without ``first``. Returns the kernel that Triton compiled.

        Raises:
            RuntimeError: ``torch.compile`` is tracing. Its tensors are fake, so only a registered operator may launch.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(f"{self.kernel.__name__} was launched while torch.compile traces: call its operator")
        return self.kernel[self.grid](*self.arguments, **self.constants)


def contiguous_columns(x: Tensor) -> Tensor:
    """Return x with stride 1 in the last dimension, copied if needed. The kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def addressable(x: Tensor) -> Tensor:
    """``contiguous_columns``, with rows less than 2**23 elements apart: ``row_pointers`` takes 256 rows in 32 bits."""
    return contiguous_columns(x if x.stride(-3) < 2**23 else x.contiguous())


def strided(x: Tensor | None) -> Strided:
    if x is None:
        return Strided(None, None, None, None)
    return Strided(x, *x.stride()[:3]) if x.dim() == 4 else Strided(x, 0, *x.stride()[:2])


def stats(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:2]) if x.dim() == 3 else Rows(x, 0, x.stride(0))


def mask_rule(call: Call, tile: Tile | None = None, walks_keys: bool = True) -> MaskRule:
    """Return the mask for a kernel.

    Args:
        tile: the kernel's tile, if the kernel can follow lists of tiles. Without it the block map becomes a term.
        walks_keys: the kernel loops over keys; otherwise over queries.
    """
    left, right, tail, *_ = (None if bound == UNUSED else bound for bound in call.bounds)
    tensors = iter(call.term_tensors)
    terms = [device_term(name, tensors) for name in call.terms.split(",") if name]
    if call.has_lists and tile is not None:
        return MaskRule(left, right, tuple(terms), tail, *_tile_list_fields(call, tile, walks_keys))
    if call.block_map is not None:
        blocks = call.block_map.contiguous()
        strides = [blocks.stride(i) if blocks.shape[i] > 1 else 0 for i in (0, 1)]
        sizes = (*blocks.shape[2:], *call.bounds.block)
        terms.append((device_mask.block_sparse, (blocks, *strides, *sizes)))
        tail = None
    return MaskRule(left, right, tuple(terms), tail)


def _tile_list_fields(call: Call, tile: Tile, walks_keys: bool) -> tuple[Any, ...]:
    """Return the fields of ``MaskRule`` that list the tiles to visit, for each row of blocks or for each column.

    The lists are allocated here and filled by ``tile_lists.lists_launch``.
    """
    block_q, block_k = call.bounds.block
    entries, heads, rows, columns = call.block_map.shape
    if walks_keys:
        row_size, capacity = block_q, columns * (block_k // tile.block_n)
    else:
        row_size, rows, capacity = block_k, columns, rows * (block_q // tile.block_m)
    tiles = call.block_map.new_empty((entries, heads, rows, capacity), dtype=torch.int32)
    counts = call.block_map.new_empty((entries, heads, rows), dtype=torch.int32)
    strides = (heads * rows if entries > 1 else 0, rows if heads > 1 else 0)
    return tiles, counts, *strides, rows, row_size, capacity


def score_arguments(call: Call) -> Score:
    slopes = readable(call.alibi_slopes)
    stride = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
    plain = not call.softcap and slopes is None
    return Score(call.scale, LOG2_E * (call.scale if plain else 1), call.softcap or None, slopes, stride)


def dropout_arguments(call: Call, walked: int | None = None) -> Dropout:
    """Return dropout's arguments for a kernel that loops over ``walked`` keys, or queries, in each step.

    A call of Philox draws for a block of pairs. A tile takes whole calls if its first query and key lie on the grid of
    these blocks, except that a tile of 16 keys never does if the mask has terms. There Triton 3.6 and 3.7 miscompile:
    they derive the width of the weights from the bytes that the term loaded, and some weights enter the product twice
    or not at all.
    """
    if call.rng is None:
        return Dropout(None, None, None, None, None, None, None)
    entry, head, query, key = call.origin
    whole = query % 16 == key % 16 == 0 and not (call.has_terms and walked == 16)
    return Dropout(call.rng, call.keep_threshold, entry, head, query, key, None if whole else 1)


def constants(head_dim: int, head_dim_v: int, group: int, tile: Tile, device: torch.device) -> dict[str, Any]:
    """Return the compile-time constants of a portable kernel."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_DV": block_d(head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": "ieee" if device.type == "cpu" else "bf16x6",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of x current, since Triton launches on the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
