"""Sums of listed rows: in PyTorch on a CPU, and by the kernel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_train.attention.parallel.row_sums import Part, sum_rows
from tests.support.attention.parallel.row_sums import check, expected

ROOT = Path(__file__).parents[3]


def test_kernel_agrees_in_the_interpreter():
    command = [sys.executable, "-m", "tests.support.attention.parallel.row_sums", "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "25 draws agree\n", done.stderr[-2000:]


@pytest.mark.gpu
def test_kernel_agrees_on_a_gpu():
    for seed in range(200):
        check(seed, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_in_pytorch(dtype):
    first, second = torch.randn(9, 3, 8).to(dtype), torch.randn(4, 3, 8).to(dtype)
    lists = torch.randint(-1, 13, (3, 20), dtype=torch.int32)
    part = Part(torch.full((20, 3, 8), float("nan"), dtype=dtype), first, second)
    sum_rows(lists, [part])
    torch.testing.assert_close(part.out, expected(lists, part).to(dtype))


def test_bf16_sums_are_rounded_once():
    """256 + 1 + 1 is 258 in one sum, and 256 if every step rounds to bf16."""
    rows = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).view(3, 1, 1)
    out = torch.empty(1, 1, 1, dtype=torch.bfloat16)
    sum_rows(torch.tensor([[0], [1], [2]], dtype=torch.int32), [Part(out, rows)])
    assert out.item() == 258
