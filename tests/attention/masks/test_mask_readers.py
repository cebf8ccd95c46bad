"""Kernels visit the same tiles and evaluate the same pairs as the mask's own answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

ROOT = Path(__file__).parents[3]
DRAWS = 120


@pytest.mark.slow
def test_kernels_visit_the_tiles_and_pairs_of_random_masks():
    """Random terms and compositions, for loops over keys and over queries; in a process with the interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.attention.readers", str(DRAWS)],
        cwd=ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert counts.pop("draws") >= DRAWS
    assert counts.pop("whole in spite of terms") >= 8, counts
    states = [n for name, n in counts.items() if not name.startswith("of ")]
    assert len(states) == 6 and min(states) >= 200, counts  # skipped, partial and whole, both ways
    terms = [n for name, n in counts.items() if name.startswith("of ")]
    assert len(terms) == 4 and min(terms) >= 8, counts
