"""A few kills; `python -m tests.support.cli.kills` runs many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import python_path

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups of Unix")
def test_runs_that_are_killed_and_resumed_lose_nothing():
    """In a separate process, as the runs are forked from one that has imported everything."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cli.kills", "--kills", "4", "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *kills, last = done.stdout.splitlines()
    assert len(kills) == 4 and last.endswith("nothing lost, losses bitwise")
