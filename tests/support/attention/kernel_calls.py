"""The calls whose kernels the compile tier compiles: every row of the tables of tiles, on every chip that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from flash_train.attention.decoding.cache_rows import CacheRows
from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels.hopper import launch as hopper
from flash_train.attention.kernels.hopper import tiles as hopper_tiles
from flash_train.attention.kernels.launch import Launch
from flash_train.attention.kernels.launch_options import present_options
from flash_train.attention.kernels.portable import launch, launch_decode
from flash_train.attention.kernels.portable.tiles import Tiles, decode_tile, tiles_for, variant_of
from flash_train.attention.kernels.results import lse_shape
from flash_train.attention.kernels.tile_sizes import Tile, block_d
from flash_train.attention.masks import BlockSparse, Causal, Document, Full, Mask, Tree, Window
from flash_train.attention.packing import Packing
from flash_train.attention.parallel import row_sums_kernel
from flash_train.attention.spec import AttentionSpec

#: largest shared memory per program, bytes
SHARED_LIMIT = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LENGTH = 256  # rows of the tensors; the code depends only on whether 16 divides it
HEADS = 4


@dataclass(frozen=True)
class Variant:
    """A kind of call on a chip: everything that determines the tiles and the code of its kernels.

    ``mask`` is one of ``MASKS``; ``extras`` are softcap, ALiBi and sinks with their gradients. With ``pieces``, entries
    have their own origins in the dropout mask. ``kernels`` are the portable ones (``triton``) or ``hopper``'s.
    """

    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    mask: str = "causal"
    dropout: bool = False
    packed: bool = False
    pieces: bool = False
    group: int = 1
    extras: bool = False
    kernels: str = "triton"

    @property
    def chip(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        flags = [name for name in ("dropout", "packed", "pieces", "extras") if getattr(self, name)]
        group = [f"group{self.group}"] if self.group > 1 else []
        own = ["hopper"] if self.kernels == "hopper" else []
        return " ".join(
            (self.chip, *own, f"{DTYPES[self.dtype]} d{self.head_dim}", "-".join((self.mask, *flags, *group)))
        )

    @property
    def row(self) -> str:
        """The name of the variant in the table of tiles."""
        rule = MASKS[self.mask]().lower()
        return variant_of(rule.right >= 0, self.dropout, bool(rule.terms))

    def tiles(self) -> Tiles:
        return tiles_for(SHARED_LIMIT[self.capability], self.dtype, self.head_dim, self.row, self.capability[0])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k (or v) and the log-sum-exp."""
        rows = (LENGTH,) if self.packed else (1, LENGTH)
        q = torch.empty(*rows, HEADS, self.head_dim, dtype=self.dtype)
        k = torch.empty(*rows, HEADS // self.group, self.head_dim, dtype=self.dtype)
        return q, k, torch.empty(lse_shape(q))

    def call(self, q: torch.Tensor, k: torch.Tensor) -> launch.Call:
        """The operator's arguments for such a call on these tensors."""
        cu = torch.zeros(9, dtype=torch.int32)
        softcap, dropout = 30.0 if self.extras else 0.0, 0.1 if self.dropout else 0.0
        spec = AttentionSpec(MASKS[self.mask](), softcap=softcap, dropout=dropout)
        per_head = torch.empty(q.shape[-2]) if self.extras else None
        rng = torch.zeros(2, dtype=torch.int64) if self.dropout else None
        packing = Packing(cu, cu) if self.packed else None
        pieces = EntryOrigins(torch.zeros(8, 3, dtype=torch.int32), aligned=True) if self.pieces else None
        return launch.Call(*operands_of(q, k, spec, packing, rng, (0, 0, 0, 0), per_head, per_head, pieces))


def _documents() -> Mask:
    return Causal() & Document(torch.zeros(LENGTH, dtype=torch.int32)) & Tree([-1, 0, 0])


MASKS = {
    "full": Full,
    "causal": Causal,
    "window": lambda: Window(100, 30) & BlockSparse(torch.ones(2, 2, dtype=torch.bool)),
    "terms": _documents,
}


def launches(variant: Variant, tiles: Tiles) -> Iterator[tuple[str, Tile | None, Launch]]:
    """Name, tile and launch of every portable kernel that such a call may start. Add new kernels here."""
    q, k, lse = variant.tensors()
    call = variant.call(q, k)
    if call.has_lists:
        tiles = tiles.within(*call.bounds[3:])
    dslope = None if call.alibi_slopes is None else lse

    yield "forward", tiles.forward, launch.forward_launch(q, k, k, q, lse, call, tiles.forward)
    alone = tiles.dv is not None
    yield "dkdv", tiles.dkdv, launch.dkdv_launch(q, k, k, q, lse, lse, k, None if alone else k, call, tiles.dkdv)
    if alone:
        yield "dv", tiles.dv, launch.dkdv_launch(q, k, k, q, lse, lse, None, k, call, tiles.dv)
    yield "dq", tiles.dq, launch.dq_launch(q, k, k, q, lse, lse, q, dslope, call, tiles.dq)
    if variant.mask == "full" and not variant.dropout:  # the kernel does not depend on them
        yield "rows", None, launch.rows_launch(q, q, lse, lse, lse, lse, call)
    if not variant.packed and variant.mask in ("full", "window"):
        yield from decode_launches(variant)
    if variant.pieces:
        yield from row_sum_launches(variant)


def hopper_launches(variant: Variant) -> Iterator[tuple[str, Tile | None, Launch]]:
    """Name, tile and launch of every Hopper kernel that such a call may start."""
    q, k, lse = variant.tensors()
    call, counter = variant.call(q, k), torch.zeros(1, dtype=torch.int32)
    yield "forward", None, hopper.forward_launch(q, k, k, q, lse, counter, call)
    long = hopper_tiles.forward_tile(block_d(variant.head_dim), 2 * present_options().long_walk, call)
    if long != hopper_tiles.forward_tile(block_d(variant.head_dim), LENGTH, call):
        yield "forward-long", None, hopper.forward_launch(q, k, k, q, lse, counter, call, long)
    sums = hopper.make_backward_buffers(q, call)
    yield "prepare", None, hopper.prepare_launch(k, q, q, lse, lse, sums, call)
    if block_d(variant.head_dim) <= hopper_tiles.WIDEST_DQ_ACCUMULATOR:
        yield "backward", None, hopper.backward_launch(q, k, k, q, sums, q, k, k, call)
        yield "finish", None, hopper.finish_launch(sums, q, k, call)
    dslope = None if call.alibi_slopes is None else lse
    alone = hopper.make_backward_buffers(q, call, with_dq=False)
    yield "dkdv", None, hopper.backward_launch(q, k, k, q, alone, q, k, k, call)
    yield "dq", None, hopper.dq_launch(q, k, k, q, alone, q, dslope, call)


def decode_launches(variant: Variant) -> Iterator[tuple[str, Tile | None, Launch]]:
    """One query with eight heads per key head; the cache is paged for the mask ``full``, else contiguous."""
    group = 8
    q = torch.empty(2, 1, 2 * group, variant.head_dim, dtype=variant.dtype)
    caches = torch.empty(4, LENGTH, 2, variant.head_dim, dtype=variant.dtype)
    pages = torch.zeros(2, 2, dtype=torch.int32) if variant.mask == "full" else None
    index = torch.zeros(2, dtype=torch.int32)
    rows = CacheRows(index, None if variant.mask == "full" else index, None, pages)
    cache_of = launch_decode.cache_argument(caches, rows)
    part, part_lse = torch.empty(4, 2, 1, 2 * group, variant.head_dim), torch.empty(4, 2, 1, 2 * group)
    tile = decode_tile(torch.device("cuda"), variant.dtype, variant.head_dim, group)
    call = variant.call(q, caches)
    decode = launch_decode.decode_launch(q, cache_of, cache_of, variant.head_dim, 2, part, part_lse, index, call, tile)
    yield "decode", tile, decode
    yield "merge", None, launch_decode.merge_launch(part, part_lse, q, part_lse, call.sinks)


def row_sum_launches(variant: Variant) -> Iterator[tuple[str, Tile | None, Launch]]:
    """The sums of rows that ranks with a shared row exchange: with one source, and with two."""
    lists = torch.zeros(2, LENGTH, dtype=torch.int32)
    q, k = (torch.empty(LENGTH, heads, variant.head_dim, dtype=variant.dtype) for heads in (2 * HEADS, HEADS))
    yield "pack", None, row_sums_kernel.launch_of(lists, [(q, q, None), (k, k, None), (k, k, None)])
    yield "sum", None, row_sums_kernel.launch_of(lists, [(k, k, k), (k, k, k)])


def all_variants() -> list[Variant]:
    """Every row of the table on every chip that uses it, and other settings that change the code on some chips."""
    chips, dims = list(SHARED_LIMIT), (64, 128, 256)
    half, flags = torch.bfloat16, (False, True)
    newest = [(8, 6), (9, 0), (10, 0)]
    found = [
        *(Variant(*key) for key in product(chips, [half, torch.float32], dims, ["full", "causal", "terms"], flags)),
        *(Variant(*key) for key in product(newest[:2], [torch.float16], dims, ["full", "causal", "terms"], flags)),
        *(Variant(*key, packed=True, group=2) for key in product(newest, [half], dims, ["full", "causal"], flags)),
        *(Variant(*key, "causal", True, True, True, 2) for key in product(newest, [half], dims)),
        *(Variant(*key, extras=True) for key in product(chips, [half], dims, ["window"], flags)),
        *(Variant(*key, extras=True) for key in product(newest, [torch.float32], dims[:2], ["window"], flags)),
        *(Variant(*key) for key in product(newest, [half], [40, 72, 80, 192], ["causal"], flags)),
        *hopper_variants((half, torch.float16), ("full", "causal", "window", "terms")),
    ]
    return found


def hopper_variants(dtypes: tuple[torch.dtype, ...], masks: tuple[str, ...]) -> list[Variant]:
    """Hopper's kernels for every head_dim; fp16, packed rows and grouped heads with one mask only."""
    own, flags, dims = (9, 0), (False, True), (64, 128, 256)
    found = [Variant(own, dtypes[0], d, mask, drop) for d, mask, drop in product(dims, masks, flags)]
    found += [Variant(own, dtypes[0], d, "causal", drop, packed=True, group=2) for d, drop in product(dims, flags)]
    found += [Variant(own, dtypes[0], d, "causal", True, packed=True, pieces=True, group=2) for d in dims]
    found += [Variant(own, dtype, d, "causal", True) for dtype, d in product(dtypes[1:], dims)]
    found += [Variant(own, dtypes[0], d, "causal", extras=True) for d in dims]
    return [replace(variant, kernels="hopper") for variant in found]


def sampled_variants() -> list[Variant]:
    """A few of each kind, mostly for Hopper."""
    half, hopper = torch.bfloat16, (9, 0)
    return [
        *(Variant(hopper, half, d, "causal", True) for d in (64, 128, 256)),
        Variant(hopper, half, 128, "terms", True),
        Variant(hopper, half, 128, "full"),
        Variant(hopper, half, 128, "window", True, extras=True),
        Variant(hopper, half, 128, "causal", packed=True, group=2),
        Variant(hopper, half, 128, "causal", True, packed=True, pieces=True, group=2),
        Variant(hopper, torch.float16, 80, "causal"),
        Variant(hopper, torch.float32, 128, "causal", True),
        Variant((8, 0), half, 128, "causal", True),
        Variant((8, 6), half, 128, "terms", True),
        Variant((8, 9), half, 64, "causal", True),
        Variant((10, 0), half, 128, "causal"),
        Variant((12, 0), half, 256, "causal", True),
        *(v for v in hopper_variants((half,), ("causal",)) if v.head_dim == 128 or not v.packed),
    ]
