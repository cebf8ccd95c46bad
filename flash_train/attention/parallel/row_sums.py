"""Sums of listed rows: one operation packs, selects and reorders rows, and adds the gradients of rows used twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The kernel is imported inside the function: CPU tensors need no Triton.


class Part(NamedTuple):
    """Tensors of one ``sum_rows``, each (rows, heads, head_dim) with contiguous head_dim; the heads may be a slice.

    The source is ``first`` followed by ``second``. The sums are written to ``out``.
    """

    out: Tensor
    first: Tensor
    second: Tensor | None = None


def sum_rows(lists: Tensor, parts: Sequence[Part]) -> None:
    """Write ``out[i] = sum over s of source[lists[s, i]]`` in each part.

    The sum has a fixed order and is in fp32, or fp64 for fp64 tensors. So it is the same in every call.

    Args:
        lists: int32 (slots, rows of out), contiguous: numbers of the source's rows; a negative one adds nothing.
        parts: their firsts have equally many rows; tensors of a part have equally many heads and the same head_dim.
    """
    if parts[0].out.is_cuda:
        from flash_train.attention.parallel.row_sums_kernel import launch

        launch(lists, parts)
        return
    for out, first, second in parts:
        source = first if second is None else torch.cat([first, second])
        total = torch.zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        for numbers in lists:
            listed = numbers >= 0
            total[listed] += source[numbers[listed]]
        out.copy_(total)
