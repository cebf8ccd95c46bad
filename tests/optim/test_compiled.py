"""The optimizer's kernel compiles in every format of weights and averages, and rounds alike in all of them."""

import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from tests.support.processes import ROOT


@pytest.mark.slow
def test_no_format_spills_or_fuses():
    """In another process, since a process cannot change Triton's driver."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.optim.compiled", "90"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = [int(count) for count in re.findall(r"(\d+) spills, 0 fused$", done.stdout, re.MULTILINE)]
    assert len(spills) == 11 and max(spills) <= 8, done.stdout
