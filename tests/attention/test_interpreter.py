"""The kernels against the contract on any machine: forward and backward under the Triton interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from tests.attention.interpreter import INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results():
    """Results of all cases by name, from one process: the interpreter is chosen before Triton is imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.attention.interpreter"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {row["case"]: row["result"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [str(case) for case in INTERPRETED])
def test_contract(results, name):
    result = results[name]
    assert not isinstance(result, str), result
    assert [e["tensor"] for e in result] == ["out", "lse", "dq", "dk", "dv"]
    assert all(e["ok"] for e in result), result
