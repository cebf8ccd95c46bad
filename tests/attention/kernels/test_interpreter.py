"""The kernels fulfil the contract on any machine: forward and backward in the Triton interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from tests.support.attention.devices import MODULES
from tests.support.attention.interpreter import INTERPRETED

ROOT = Path(__file__).parents[3]
PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_contract(part):
    """Every second case, in another process: Triton reads TRITON_INTERPRET when it is imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.attention.interpreter", str(part), "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    results = {row["case"]: row["result"] for row in map(json.loads, done.stdout.splitlines())}
    assert list(results) == [str(case) for case in INTERPRETED[part::2]]
    for name, result in results.items():
        assert not isinstance(result, str), f"{name}: {result}"
        assert {"out", "dq", "dk", "dv"} <= {e["tensor"] for e in result}, name
        assert all(e["ok"] for e in result), f"{name}: {result}"


def test_names_are_unique():
    names = [str(case) for case in INTERPRETED]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_modules_in_the_interpreter(part):
    """Tests with ``@on_devices``, on the CPU. Each part imports the libraries once for several modules."""
    modules = [f"tests/attention/{module}" for module in MODULES[part::PARTS]]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--all", "-m", "not gpu", "-ra", *modules],
        cwd=ROOT, capture_output=True, text=True, timeout=900, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
