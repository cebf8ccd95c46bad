"""Kernels compile without a GPU, fit into shared memory, and have few spills; and spills are detected."""

import subprocess
import sys
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

from flash_train.attention.kernels.portable.tiles import load_table, tiles_for
from tests.support.attention.compiled import allowed_spills, problems_of
from tests.support.attention.kernel_calls import SHARED_LIMIT, Variant, all_variants, sampled_variants
from tests.support.attention.machine_code import Resources, unsafe_divisions

ROOT = Path(__file__).parents[3]
HOPPER = Variant((9, 0), torch.bfloat16, 128)


def compile_tier(*arguments):
    """Compile in another process, since a process cannot change its driver."""
    command = [sys.executable, "-m", "tests.support.attention.compiled", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_some_kernels_of_each_kind_compile():
    done = compile_tier()
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith("kernels, 0 failures")
    assert int(last.split()[1]) >= 3 * len(sampled_variants())


@pytest.mark.slow
def test_tile_that_spills_is_detected():
    """The tile is far too large for the registers of four warps."""
    variant = str(Variant((9, 0), torch.bfloat16, 128, "causal", True))
    done = compile_tier("--only", f"^{variant}$", "--tile", "128", "128", "4", "2", "--verbose")
    *kernels, last = done.stdout.splitlines()
    assert done.returncode == 1 and last == "compiled 3 kernels, 3 failures"
    for name, line in zip(("forward", "dkdv", "dq"), kernels, strict=True):
        assert line.startswith(f"FAILED {variant} {name} 128x128, 4 warps, 2 stages: ")
        assert "bytes of stack a thread, allowed are" in line and "instructions that spill or reload" in line


LOOP = """
  tt.func public @f(%n: i32, %size: i32) {{
    %c1 = arith.constant 1 : i32
    %half = arith.shrsi %n, %c1 : i32
    %safe = arith.maxsi %half, %c1 : i32
    %before = arith.divsi %n, %half : i32
    %sum = scf.for %i = %c1 to %n step %c1 iter_args(%acc = %c1) -> (i32)  : i32 {{
      %at = arith.{operation} %i, {divisor} : i32
      scf.yield %at : i32
    }}
    %after = arith.remsi %n, %half : i32
"""


@pytest.mark.parametrize("operation", ["divsi", "remsi", "divui"])
@pytest.mark.parametrize("divisor, unsafe", [("%half", 1), ("%safe", 0), ("%c1", 0), ("%size", 0)])
def test_divisions_in_loops_by_possible_zeros_are_counted(operation, divisor, unsafe):
    assert unsafe_divisions(LOOP.format(operation=operation, divisor=divisor)) == unsafe


def test_limits_on_compiled_kernels():
    stack, spills = allowed_spills(replace(HOPPER, kernels="hopper"))
    assert problems_of(replace(HOPPER, kernels="hopper"), Resources(255, stack, spills, SHARED_LIMIT[9, 0], 512)) == []
    worse = (
        (Resources(255, stack + 1, 0, 0, 0), "bytes of stack"),
        (Resources(255, 0, spills + 1, 0, 0), "spill or reload"),
        (Resources(255, 0, 0, SHARED_LIMIT[9, 0] + 1, 0), "bytes of shared memory"),
        (Resources(255, 0, 0, 0, 513), "columns of tensor memory"),
        (Resources(255, 0, 0, 0, 0, serial=True), "every product by itself"),
        (Resources(255, 0, 0, 0, 0, meetings=4), "4 times a step, allowed are 3"),
    )
    for resources, words in worse:
        (problem,) = problems_of(replace(HOPPER, kernels="hopper"), resources)
        assert words in problem
    assert problems_of(HOPPER, Resources(255, 0, 0, 0, 0, serial=True, meetings=4)) == []


def test_every_row_of_the_table_is_compiled_for_every_chip_that_uses_it():
    compiled = {(v.capability, 8 * v.dtype.itemsize, v.head_dim, v.row) for v in all_variants()}
    served = []
    for (chip, limit), row in product(SHARED_LIMIT.items(), load_table()):
        key = (row["bits"], row["head_dim"], row["variant"])
        dtype = torch.bfloat16 if row["bits"] == 16 else torch.float32
        chosen = vars(tiles_for(limit, dtype, *key[1:], chip[0]))
        if {name: list(astuple(tile)) for name, tile in chosen.items() if tile} == tiles_in(row):
            assert (chip, *key) in compiled
            served.append(row)
    assert all(row in served for row in load_table())


def tiles_in(row):
    return {name: row[name] for name in ("forward", "dkdv", "dq", "dv") if name in row}


@pytest.mark.slow
def test_packings_share_a_kernel():
    """The number of documents per row changes from batch to batch, and this must not compile kernels during a run."""
    command = [sys.executable, "-m", "tests.support.attention.packings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    forms = dict(line.split() for line in done.stdout.splitlines())
    assert len(forms) == 9 and set(forms.values()) == {"1"}, forms
