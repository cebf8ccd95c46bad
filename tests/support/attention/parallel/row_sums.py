"""Random sums of listed rows by the kernel, compared with a loop in fp64; on a GPU, or in Triton's interpreter.

python -m tests.support.attention.parallel.row_sums DRAWS
"""

from __future__ import annotations

import random
import sys

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch
from torch import Tensor

from flash_train.attention.parallel.row_sums import Part
from flash_train.attention.parallel.row_sums_kernel import launch

DTYPES = (torch.float32, torch.float16, torch.float64)  # the interpreter computes bfloat16 wrongly


def expected(lists: Tensor, part: Part) -> Tensor:
    """Sum in fp64, row by row, and round once."""
    source = part.first if part.second is None else torch.cat([part.first, part.second])
    out = torch.zeros(part.out.shape, dtype=torch.float64, device=part.out.device)
    for numbers in lists.tolist():
        for row, number in enumerate(numbers):
            if number >= 0:
                out[row] += source[number].double()
    return out


def check(seed: int, device: str) -> None:
    """Raise AssertionError if a draw differs from the loop by more than its rounding."""
    draw, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    dtype = draw.choice([*DTYPES, torch.bfloat16] if device == "cuda" else DTYPES)
    rows, firsts, seconds, slots = draw.randint(0, 40), draw.randint(1, 30), draw.choice([0, 7]), draw.randint(1, 3)
    lists = torch.randint(-1, firsts + seconds, (slots, rows), generator=generator, device=device, dtype=torch.int32)
    heads = draw.choice([1, 2, 5])

    def random_rows(count: int, columns: int) -> Tensor:
        whole = torch.randn(count, heads + 2, columns, generator=generator, device=device)
        return whole.to(dtype)[:, 1 : heads + 1]  # heads are a slice, as for a group of heads

    every = []
    widths = draw.choice([(64,), (24, 8), (128, 40)])
    for _ in range(2):  # the second launch is prepared by the first
        parts = []
        for columns in widths:
            out = torch.full((rows, heads + 2, columns), float("nan"), dtype=dtype, device=device)[:, 1 : heads + 1]
            second = random_rows(seconds, columns) if seconds else None
            parts.append(Part(out, random_rows(firsts, columns), second))
        launch(lists, parts)
        every += parts
    for part in every:
        right = expected(lists, part)
        limit = torch.finfo(dtype).eps * (right.abs() + 1) if dtype.itemsize < 4 else 1e-6 if dtype.itemsize == 4 else 0
        assert ((part.out.double() - right).abs() <= limit).all(), (seed, dtype)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        check(seed, "cpu")
    print(f"{sys.argv[1]} draws agree")
