"""NVIDIA's memory checker finds nothing in selected calls of every kernel (``tests.support.attention.sanitized``)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

from flash_train.attention.kernels.families import HOPPER

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
PARTS = 4

OUT_OF_BOUNDS = """
import torch, triton
import triton.language as tl

@triton.jit
def read(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + tl.arange(0, N)))

x, y = (torch.zeros(n, device="cuda") for n in (1000, 2048))
read[(1,)](x, y, 2048)
torch.cuda.synchronize()
"""


def checked(tool, *command):
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("needs compute-sanitizer, of CUDA's toolkit")
    done = subprocess.run(
        [checker, "--tool", tool, "--error-exitcode", "7", "--print-limit", "5", sys.executable, "-W", "ignore",
         *command],
        cwd=ROOT, capture_output=True, text=True, timeout=1800,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


# initcheck does not see writes by TMA, and so reports every output of Hopper's kernels that is read again. For these
# kernels the contract's poisoned memory replaces it: uninitialised memory is NaN.
TOOLS = [("memcheck", "triton"), ("memcheck", "hopper"), ("memcheck", "decode"), ("initcheck", "triton")]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tool, kernels", TOOLS)
def test_the_checker_finds_nothing(tool, kernels, part):
    if kernels == "hopper" and (reason := HOPPER.unavailable(torch.device("cuda", 0))):
        pytest.skip(reason)
    only_run = ["--only-run"] if tool == "initcheck" else []
    status, said = checked(tool, "-m", "tests.support.attention.sanitized", kernels, str(part), str(PARTS), *only_run)
    assert status == 0 and "ERROR SUMMARY: 0 errors" in said, said[-6000:]
    assert f"{kernels}: 0 wrong" in said


def test_a_read_past_the_end_is_found(tmp_path):
    script = tmp_path / "read.py"
    script.write_text(OUT_OF_BOUNDS)
    status, said = checked("memcheck", str(script))
    assert status != 0 and "Invalid __global__ read" in said, said[-3000:]
