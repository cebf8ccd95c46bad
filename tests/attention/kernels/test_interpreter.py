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
PROCESSES = 2


@pytest.fixture(scope="module")
def results():
    """Results of all cases by name, from other processes: Triton reads TRITON_INTERPRET when it is imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.attention.interpreter"]
    started = [
        subprocess.Popen(
            [*command, str(first), str(PROCESSES)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for first in range(PROCESSES)
    ]
    rows = []
    for process in started:
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err
        rows += map(json.loads, out.splitlines())
    return {row["case"]: row["result"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", [str(case) for case in INTERPRETED])
def test_contract(results, name):
    result = results[name]
    assert not isinstance(result, str), result
    assert {"out", "dq", "dk", "dv"} <= {e["tensor"] for e in result}
    assert all(e["ok"] for e in result), result


def test_names_are_unique():
    names = [str(case) for case in INTERPRETED]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_modules_in_the_interpreter(module):
    """Tests with ``@on_devices``, on the CPU."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--all", "-m", "not gpu", f"tests/attention/{module}"],
        cwd=ROOT, capture_output=True, text=True, timeout=900, env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
