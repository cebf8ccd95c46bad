"""Tile shapes for this GPU: ``python scripts/tune_attention.py 64 128 --variant causal full --write``.

Times candidates for each kernel alone, after checking their results against fp32, and prints the tile of the table and
the best one. With --write, the rows for this GPU's amount of shared memory go into the kernels' ``tiles.json``, one at
a time. Nothing is tuned at run time: every user gets the tiles that this command has written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, replace
from itertools import product
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_train.attention.kernels.gpu import major_of, shared_memory
from flash_train.attention.kernels.portable.tiles import OWN_ROWS, TABLE, VARIANTS, Tiles, load_table, tiles_for
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.cli.config.errors import ArgumentParser, UnavailableError, one_line_errors
from flash_train.files import write_text
from flash_train.profiling.attention.tuning import (
    Problem,
    Setting,
    Unfit,
    candidates,
    compile_only,
    smaller,
    try_tile,
)

HEAD_DIMS = (64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHOICES = ("forward", "dq", "dkdv")
WIDTH = 2048  #: heads times head_dim of the timed call
SHARE = 4  #: candidates that a process compiles at a time
GAIN = 0.01  #: a tile replaces the table's only if it saves this fraction of the time; less is noise


class Timed(NamedTuple):
    """A tile and its milliseconds."""

    tile: Tile
    ms: float


def sweep(kernel: str, tiles: Iterable[Tile], trial: Callable[[str, Tile], float]) -> list[Timed]:
    """The time of every tile, in order; unfit tiles are left out with a note."""
    found = []
    for tile in tiles:
        try:
            found.append(Timed(tile, trial(kernel, tile)))
        except Unfit as reason:
            print(f"  {kernel} {list(astuple(tile))}: skipped, {reason}", flush=True)
    return found


def best(timed: list[Timed], current: Tile | None) -> Timed | None:
    """The fastest tile, or the current one if it is about as fast; None if nothing ran."""
    if not timed:
        return None
    fastest = min(timed, key=lambda one: one.ms)
    known = next((one for one in timed if one.tile == current), None)
    return known if known is not None and fastest.ms > (1 - GAIN) * known.ms else fastest


def tune_row(
    old: Tiles,
    kernels: Iterable[str],
    candidates_of: Callable[[str], list[Tile]],
    trial: Callable[[str, Tile], float],
    apart: bool,
) -> Tiles:
    """The best tiles for the chosen kernels; the other tiles stay.

    Args:
        kernels: some of ``CHOICES``.
        candidates_of: the tiles to try for a kernel, in addition to the current one.
        trial: milliseconds of a kernel with a tile.
        apart: whether to also try dK and dV in separate launches.
    """

    def search(kernel: str, current: Tile | None) -> Timed | None:
        tiles = dict.fromkeys([*([] if current is None else [current]), *candidates_of(kernel)])
        timed = sweep(kernel, tiles, trial)
        found = best(timed, current)
        print(_line(kernel, current, next((one.ms for one in timed if one.tile == current), None), found), flush=True)
        return found

    new = old
    for kernel in ("forward", "dq"):
        if kernel in kernels and (found := search(kernel, getattr(old, kernel))):
            new = replace(new, **{kernel: found.tile})
    if "dkdv" in kernels:
        is_apart = old.dv is not None
        joint = search("dkdv", None if is_apart else old.dkdv)
        dk = search("dk", old.dkdv if is_apart else None) if apart or is_apart else None
        dv = search("dv", old.dv) if apart or is_apart else None
        if dk and dv and (joint is None or dk.ms + dv.ms < (1 - GAIN) * joint.ms):
            new = replace(new, dkdv=dk.tile, dv=dv.tile)
        elif joint:
            new = replace(new, dkdv=joint.tile, dv=None)
        print(f"  dK and dV {'in one launch' if new.dv is None else 'apart'}", flush=True)
    return new


def _line(kernel: str, current: Tile | None, before: float | None, found: Timed | None) -> str:
    def shown(tile: Tile | None, ms: float | None) -> str:
        size = "-" if tile is None else "{}x{} {}w {}s".format(*astuple(tile))
        return f"{size:>14} {'-' if ms is None else f'{ms:.3f}':>9}"

    gain = f"{before / found.ms:8.3f}" if before and found else f"{'-':>8}"
    new = (None, None) if found is None else found
    return f"  {kernel:8} {shown(current, before)} {shown(*new)} {gain}"


def merge_row(table: list[dict[str, Any]], row: dict[str, Any], variants: Iterable[str]) -> list[dict[str, Any]]:
    """The table with a row that replaces the one for the same calls, or is inserted in order."""
    order = list(variants)

    def place(one: dict[str, Any]) -> tuple[int, ...]:
        return one["bits"], -one["shared"], one.get("major", 0), one["head_dim"], order.index(one["variant"])

    return sorted([*(one for one in table if place(one) != place(row)), row], key=place)


def format_table(table: list[dict[str, Any]]) -> str:
    """JSON with one line per row."""
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in table) + "\n]\n"


def tune(setting: Setting, kernels: list[str], apart: bool, rep: int, pool: Pool) -> dict[str, Any]:
    """The new row of the table for a setting on this GPU; the processes of ``pool`` compile."""
    from triton.testing import do_bench

    device = torch.device("cuda")
    shared, major = shared_memory(device), major_of(device)
    old = tiles_for(shared, setting.dtype, setting.head_dim, setting.variant, major)

    def candidates_of(kernel: str) -> list[Tile]:
        return candidates(kernel, setting, shared)

    # Compiling takes most of the time, so many processes do it at once; this process alone does the timing.
    names = [*kernels, *(("dk", "dv") if apart and "dkdv" in kernels else ())]
    tries = [(name, tile) for name in names for tile in candidates_of(name)]
    shares = [tries[i : i + SHARE] for i in range(0, len(tries), SHARE)]
    pool.starmap(compile_only, [(smaller(setting), old.forward, share) for share in shares])
    small, large = Problem(smaller(setting), old.forward, device), Problem(setting, old.forward, device)

    def trial(kernel: str, tile: Tile) -> float:
        return try_tile(kernel, tile, small, large, lambda f: do_bench(f, warmup=15, rep=rep, return_mode="median"))

    print(f"d{setting.head_dim} {setting.variant}, {len(tries)} candidates")
    print(f"  {'kernel':8} {'table':>14} {'ms':>9} {'best':>14} {'ms':>9} {'speed-up':>8}")
    return row_of(setting, shared, major, tune_row(old, kernels, candidates_of, trial, apart))


def row_of(setting: Setting, shared: int, major: int, tiles: Tiles) -> dict[str, Any]:
    """A row in the table's format; it names the chip only if the table has separate rows for it."""
    row: dict[str, Any] = {"shared": shared // 1024} | ({"major": major} if major in OWN_ROWS else {})
    row |= {"bits": 8 * setting.dtype.itemsize, "head_dim": setting.head_dim}
    chosen = {name: list(tile.values()) for name, tile in asdict(tiles).items() if tile is not None}
    return row | {"variant": setting.variant} | chosen


@one_line_errors()
def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/extending.md#a-tile-table")
    parser.add_argument("head_dims", nargs="+", type=int, choices=HEAD_DIMS, help="head dimensions to tune")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to tune")
    parser.add_argument("--kernel", nargs="+", choices=CHOICES, default=list(CHOICES), help="kernels to tune")
    parser.add_argument("--apart", action="store_true", help="also try dK and dV in two launches (256: always)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="bf16 also stands for fp16")
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens of the timed call")
    parser.add_argument("--rep", type=int, default=60, help="milliseconds of repetitions per candidate")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--write", action="store_true", help="write the rows into the table")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to write to")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UnavailableError("tune_attention: needs an NVIDIA GPU, and there is none")
    with get_context("spawn").Pool(options.workers) as pool:
        for head_dim, variant in product(options.head_dims, options.variant):
            setting = Setting(head_dim, DTYPES[options.dtype], variant, options.seq_len, WIDTH // head_dim)
            row = tune(setting, options.kernel, options.apart or head_dim > 128, options.rep, pool)
            print(f"  {json.dumps(row)}", flush=True)
            if options.write:
                table = json.loads(options.table.read_text(encoding="utf-8"))
                write_text(options.table, format_table(merge_row(table, row, VARIANTS)))
                load_table.cache_clear()
                tiles_for.cache_clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
