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
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from flash_train.attention.kernels.hopper.gluon_compat import ARRIVAL_SYNCS, ASM_TAKES_BARRIERS
from flash_train.attention.kernels.portable import launch
from flash_train.attention.kernels.portable.tiles import Tiles
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.files import write_json
from tests.support.attention.kernel_calls import (
    SHARED_LIMIT,
    Variant,
    all_variants,
    hopper_launches,
    launches,
    sampled_variants,
)
from tests.support.attention.machine_code import Resources, resources_of

TENSOR_MEMORY_LIMIT = 512  # columns, on chips with tensor memory
#: barriers of all warps of a partition per loop step, in kernels for Hopper; Triton 3.8 adds one before each arrival
MEETINGS = 6 if ARRIVAL_SYNCS and not ASM_TAKES_BARRIERS else 3


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
    cpu, gpu = (launch.constants(torch.empty(1, 1, 1, 16, device=name), 16, 1, tile) for name in ("cpu", "meta"))
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
    extras = 96 if variant.extras else 16 if variant.pieces else 0
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
    parser.add_argument(
        "--only", default="", help="variants whose name this regular expression finds, such as 'sm_90 bf16 d128'"
    )
    parser.add_argument(
        "--tile", nargs=4, type=int, metavar=("M", "N", "WARPS", "STAGES"), help="instead of the table's tile"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--record", type=Path, help="JSON file for the counts by Triton's version and chip")
    parser.add_argument("--verbose", action="store_true", help="also print kernels without problems")
    options = parser.parse_args(argv)
    tile = None if options.tile is None else Tile(*options.tile)
    variants = [v for v in (all_variants() if options.all else sampled_variants()) if re.search(options.only, str(v))]
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
