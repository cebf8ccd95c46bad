"""The tuner: its candidates include the shipped tiles, and its check detects wrong results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention.kernels.portable.tiles import load_table
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.profiling.attention.tuning import KERNELS, Setting, Unfit, candidates, try_tile

ROOT = Path(__file__).parents[3]


def test_candidates_include_nearly_every_tile_of_the_table():
    """A bound that leaves out a tile of the table, which was once the fastest, is too narrow."""
    tiles = missing = 0
    for row in load_table():
        dtype = torch.bfloat16 if row["bits"] == 16 else torch.float32
        setting = Setting(row["head_dim"], dtype, row["variant"], 16384, 16)
        for kernel in ("forward", "dq", "dkdv", "dv"):
            if kernel in row:
                name = "dk" if kernel == "dkdv" and "dv" in row else kernel
                tiles += 1
                missing += Tile(*row[kernel]) not in candidates(name, setting, row["shared"] * 1024)
    assert tiles > 150 and missing <= 0.02 * tiles


@pytest.mark.parametrize("kernel", KERNELS)
def test_number_of_candidates_is_reasonable(kernel):
    for head_dim in (16, 64, 128, 256):
        for kib in (99, 227):
            found = candidates(kernel, Setting(head_dim, torch.bfloat16, "full", 16384, 16), kib * 1024)
            assert 20 < len(found) < 100 and len(set(found)) == len(found)


def test_tile_that_cannot_be_launched_is_unfit():
    from triton.runtime.errors import OutOfResources

    class Large:
        def check(self, kernel, tile):
            raise OutOfResources(300000, 232448, "shared memory")

    with pytest.raises(Unfit, match="Required: 300000, Hardware limit: 232448"):
        try_tile("dq", Tile(128, 128, 4, 3), Large(), Large(), lambda call: 1.0)


INTERPRETED = """
import json, torch
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.profiling.attention.tuning import KERNELS, Problem, Setting, Unfit, try_tile
torch.manual_seed(0)
for variant in ("causal", "dropout-full", "terms"):
    problem = Problem(Setting(16, torch.float32, variant, 50, 2), Tile(32, 16, 4, 1), torch.device("cpu"))
    for kernel in KERNELS:
        calls = []
        try_tile(kernel, Tile(16, 32, 4, 1), problem, problem, lambda call: calls.append(call()) or 1.0)
        said = "right" if len(calls) == 1 else "not timed"
        problem.exact[{"forward": "out", "dkdv": "dv"}.get(kernel, kernel)] *= 1.001
        try:
            try_tile(kernel, Tile(16, 32, 4, 1), problem, problem, lambda call: calls.append(call()) or 1.0)
        except Unfit as reason:
            said += ", then " + str(reason).split(":")[0]
        del problem.exact
        print(json.dumps([variant, kernel, said, len(calls)]), flush=True)
"""


@pytest.mark.slow
def test_every_kernel_is_checked_against_the_reference():
    """In the interpreter: each kernel alone passes, and does not when the reference differs by a thousandth."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3 * len(KERNELS)
    for variant, kernel, said, timed in rows:
        wrong = {"forward": "out", "dkdv": "dv"}.get(kernel, kernel)
        assert (said, timed) == (f"right, then wrong {wrong}", 1), variant
