"""The compile tier: compiles every kernel with every shipped tile to machine code, without a GPU.

``python -m tests.support.attention.compiled --all`` checks that each binary fits into its chip's shared memory and that
its spills are within a limit. Without ``--all`` the command compiles the few kernels that the tests compile. A fake
driver names the target, so that Triton stops after compilation. A process cannot change its driver.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from flash_train.attention.decoding.cache_rows import CacheRows
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels import arguments
from flash_train.attention.kernels.hopper import launch as hopper
from flash_train.attention.kernels.hopper import tiles as hopper_tiles
from flash_train.attention.kernels.hopper.gluon_compat import ARRIVAL_SYNCS, ASM_TAKES_BARRIERS
from flash_train.attention.kernels.launch_options import present_options
from flash_train.attention.kernels.portable import launch, launch_decode
from flash_train.attention.kernels.portable.tiles import Tile, Tiles, block_d, decode_tile, tiles_for, variant_of
from flash_train.attention.masks import BlockSparse, Causal, Document, Full, Mask, Tree, Window
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec
from flash_train.files import write_json
from tests.support.attention.machine_code import Resources, resources_of

#: largest shared memory per program, bytes
SHARED_LIMIT = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
TENSOR_MEMORY_LIMIT = 512  # columns, on chips with tensor memory
#: barriers of all warps of a partition per loop step, in kernels for Hopper; Triton 3.8 adds one before each arrival
MEETINGS = 6 if ARRIVAL_SYNCS and not ASM_TAKES_BARRIERS else 3
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LENGTH = 256  # rows of the tensors; the code depends only on whether 16 divides it
HEADS = 4


class AbsentDevice:
    """A fake driver with the functions that Triton calls for compilation."""

    def __init__(self) -> None:
        self.capability = (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)

    def get_current_device(self) -> tuple[int, int]:
        return self.capability

    def get_current_stream(self, device: object = None) -> int:
        return 0


@dataclass(frozen=True)
class Variant:
    """A kind of call on a chip: everything that determines the tiles and the code of its kernels.

    ``mask`` is one of ``MASKS``; ``extras`` are softcap, ALiBi and sinks with their gradients. ``kernels`` are the
    portable ones (``triton``) or ``hopper``'s.
    """

    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    mask: str = "causal"
    dropout: bool = False
    packed: bool = False
    group: int = 1
    extras: bool = False
    kernels: str = "triton"

    @property
    def chip(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        flags = [name for name in ("dropout", "packed", "extras") if getattr(self, name)]
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
        return q, k, torch.empty(launch.lse_shape(q))

    def call(self, q: torch.Tensor, k: torch.Tensor) -> launch.Call:
        """The operator's arguments for such a call on these tensors."""
        cu = torch.zeros(9, dtype=torch.int32)
        softcap, dropout = 30.0 if self.extras else 0.0, 0.1 if self.dropout else 0.0
        spec = AttentionSpec(MASKS[self.mask](), softcap=softcap, dropout=dropout)
        per_head = torch.empty(q.shape[-2]) if self.extras else None
        rng = torch.zeros(2, dtype=torch.int64) if self.dropout else None
        packing = Packing(cu, cu) if self.packed else None
        return launch.Call(*operands_of(q, k, spec, packing, rng, (0, 0, 0, 0), per_head, per_head))


def _documents() -> Mask:
    return Causal() & Document(torch.zeros(LENGTH, dtype=torch.int32)) & Tree([-1, 0, 0])


MASKS = {
    "full": Full,
    "causal": Causal,
    "window": lambda: Window(100, 30) & BlockSparse(torch.ones(2, 2, dtype=torch.bool)),
    "terms": _documents,
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel of a variant, and its problems as text."""

    variant: Variant
    kernel: str
    tile: Tile | None
    resources: Resources | None = None
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.tile is None:
            return f"{self.variant} {self.kernel}"
        m, n, warps, stages = astuple(self.tile)
        return f"{self.variant} {self.kernel} {m}x{n}, {warps} warps, {stages} stages"


def launches(variant: Variant, tiles: Tiles) -> Iterator[tuple[str, Tile | None, launch.Launch]]:
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


def hopper_launches(variant: Variant) -> Iterator[tuple[str, Tile | None, launch.Launch]]:
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


def decode_launches(variant: Variant) -> Iterator[tuple[str, Tile | None, launch.Launch]]:
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


def compile_variant(variant: Variant, tile: Tile | None = None) -> list[Compiled]:
    """Compile the variant's kernels and check the limits; ``tile`` replaces the table's tiles."""
    _driver().capability = variant.capability
    if variant.kernels == "hopper":
        all_launches = hopper_launches(variant)
    else:
        all_launches = launches(variant, variant.tiles() if tile is None else Tiles(tile, tile, tile))
    done = []
    for name, own, found in _with_first(all_launches):
        constants = found.options | {key: value for key, value in _on_gpu().items() if key in found.constants}
        try:
            kernel = found.kernel.warmup(*found.arguments, grid=(1,), **constants)
        except (TritonError, RuntimeError) as failure:
            done.append(Compiled(variant, name, own, problems=[f"does not compile: {str(failure).splitlines()[0]}"]))
            continue
        resources = resources_of(kernel)
        done.append(Compiled(variant, name, own, resources, problems_of(variant, resources)))
    return done


def _with_first(launches: Iterable[tuple[str, Tile | None, launch.Launch]]) -> Iterator[tuple[str, Any, launch.Launch]]:
    for name, tile, found in launches:
        yield from ((f"{name}-{first.kernel.__name__}", None, first) for first in found.first)
        yield name, tile, found


@cache
def _on_gpu() -> dict[str, Any]:
    """The kernel constants that are different for tensors on a GPU; the tensors here are on the CPU."""
    tile = Tile(16, 16, 4, 1)
    cpu, gpu = (arguments.constants(torch.empty(1, 1, 1, 16, device=name), 16, 1, tile) for name in ("cpu", "meta"))
    return {key: gpu[key] for key in gpu if gpu[key] != cpu[key]}


@cache
def _driver() -> AbsentDevice:
    """The fake driver of this process."""
    driver = AbsentDevice()
    triton.runtime.driver.set_active(driver)
    return driver


def problems_of(variant: Variant, found: Resources) -> list[str]:
    stack, spills = allowed_spills(variant)
    limits = (
        ("bytes of shared memory", found.shared, SHARED_LIMIT[variant.capability]),
        ("columns of tensor memory", found.tensor_memory, TENSOR_MEMORY_LIMIT),
        ("bytes of stack a thread", found.stack, stack),
        ("instructions that spill or reload", found.spills, spills),
        ("divisions in loops by what may be 0", found.divisions, 0),
    )
    problems = [f"{value} {what}, allowed are {limit}" for what, value, limit in limits if value > limit]
    if variant.kernels == "hopper":  # in portable kernels Triton decides about both
        if found.serial:
            problems.append("the assembler runs every product by itself")
        if found.meetings > MEETINGS:
            problems.append(f"all warps wait for each other {found.meetings} times a step, allowed are {MEETINGS}")
    return problems


def allowed_spills(variant: Variant) -> tuple[int, int]:
    """Bytes of stack per thread and spill instructions: slightly more than the shipped tiles need.

    If 16 does not divide head_dim, Triton must assume unaligned addresses, and loads go through registers element by
    element.
    """
    if variant.kernels == "hopper":
        if variant.mask == "terms":  # the forward has the code of the mask twice, also in the recomputation of a block
            return 560, 832
        if variant.mask == "window" and variant.dropout:  # a window has two bounds for each query
            return 208, 264
        return (192, 200) if variant.dropout or variant.extras else (144, 128)
    if variant.head_dim % 16:
        return 1536, 1536
    extras = 96 if variant.extras else 0
    stack, spills = 160, 160
    if variant.head_dim > 128 and variant.dtype == torch.float32:
        stack, spills = 768, 768
    elif variant.head_dim > 128 and variant.dropout:
        stack, spills = 224, 176
    if variant.capability == (10, 0):  # accumulators move between tensor memory and registers in every step
        stack, spills = stack + 112, spills + 144
    if variant.mask == "terms" and variant.dropout:  # there is also a loop over clear blocks, without terms
        return stack + 144, spills + 112
    return stack + extras, spills + extras // 2


def all_variants() -> list[Variant]:
    """Every row of the table on every chip that uses it, and other settings that change the code on some chips."""
    chips, dims = list(SHARED_LIMIT), (64, 128, 256)
    half, flags = torch.bfloat16, (False, True)
    newest = [(8, 6), (9, 0), (10, 0)]
    found = [
        *(Variant(*key) for key in product(chips, [half, torch.float32], dims, ["full", "causal", "terms"], flags)),
        *(Variant(*key) for key in product(newest[:2], [torch.float16], dims, ["full", "causal", "terms"], flags)),
        *(Variant(*key, packed=True, group=2) for key in product(newest, [half], dims, ["full", "causal"], flags)),
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
    found += [Variant(own, dtype, d, "causal", True) for dtype, d in product(dtypes[1:], dims)]
    found += [Variant(own, dtypes[0], d, "causal", extras=True) for d in dims]
    return [replace(variant, kernels="hopper") for variant in found]


def sampled_variants() -> list[Variant]:
    """A few of each kind, mostly for Hopper."""
    half, hopper = torch.bfloat16, (9, 0)
    return [
        *(Variant(hopper, half, d, "causal", dropout) for d, dropout in product((64, 128, 256), (False, True))),
        *(Variant(hopper, half, d, "terms", True) for d in (64, 128, 256)),
        Variant(hopper, half, 128, "full"),
        Variant(hopper, half, 128, "window", True, extras=True),
        Variant(hopper, half, 128, "causal", packed=True, group=2),
        Variant(hopper, torch.float16, 80, "causal"),
        Variant(hopper, torch.float32, 128, "causal", True),
        Variant((8, 0), half, 128, "causal", True),
        Variant((8, 6), half, 128, "terms", True),
        Variant((8, 9), half, 64, "causal", True),
        Variant((8, 9), torch.float32, 64, "full", True),
        Variant((10, 0), half, 128, "causal"),
        Variant((12, 0), half, 256, "causal", True),
        *(v for v in hopper_variants((half,), ("causal",)) if v.head_dim == 128 or not v.packed),
    ]


def count(records: dict[str, dict[str, Any]], found: Compiled) -> None:
    """Add a kernel to the record of its chip and kind."""
    kind = f"{found.variant.chip} {found.variant.kernels}"
    new = {
        "triton": triton.__version__,
        "kind": kind,
        "kernels": 0,
        "failures": 0,
        "stack": 0,
        "spills": 0,
        "shared": 0,
    }
    record = records.setdefault(kind, new)
    record["kernels"] += 1
    record["failures"] += bool(found.problems)
    if found.resources is not None:
        for name in ("stack", "spills", "shared"):
            record[name] = max(record[name], getattr(found.resources, name))


def write_records(path: Path, new: list[dict[str, Any]]) -> None:
    """Write the records. A record replaces an earlier one of the same version and kind."""
    old = json.loads(path.read_text(encoding="utf-8"))["records"] if path.is_file() else []
    records = {(record["triton"], record["kind"]): record for record in (*old, *new)}
    rows = [records[key] for key in sorted(records)]
    write_json(path, {"records": rows})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every row of the table for every chip; slow on few cores")
    parser.add_argument("--only", default="", help="variants whose name contains this, such as 'sm_90 bf16 d128'")
    parser.add_argument(
        "--tile", nargs=4, type=int, metavar=("M", "N", "WARPS", "STAGES"), help="instead of the table's tile"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--record", type=Path, help="JSON file for the counts by Triton's version and chip")
    parser.add_argument("--verbose", action="store_true", help="also print kernels without problems")
    options = parser.parse_args(argv)
    tile = None if options.tile is None else Tile(*options.tile)
    variants = [v for v in (all_variants() if options.all else sampled_variants()) if options.only in str(v)]
    kernels = failures = 0
    records: dict[str, dict[str, Any]] = {}
    # Triton keeps compiled kernels in memory: restart processes from time to time
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=20) as pool:
        for compiled in pool.imap_unordered(partial(compile_variant, tile=tile), variants):
            for found in compiled:
                kernels += 1
                failures += bool(found.problems)
                count(records, found)
                if found.problems:
                    print(f"FAILED {found}: {'; '.join(found.problems)}", flush=True)
                elif options.verbose:
                    print(f"{found}: {found.resources}", flush=True)
    print(f"compiled {kernels} kernels, {failures} failures")
    if options.record is not None:
        write_records(options.record, list(records.values()))
    return int(failures > 0 or kernels == 0)


if __name__ == "__main__":
    sys.exit(main())
