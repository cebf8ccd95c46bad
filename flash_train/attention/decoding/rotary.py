"""Rotary position embedding for queries and for new keys of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_train.attention.index_tensors import check_range


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` dimensions of x; the others stay. Computed in at least fp32.

    Args:
        x: (batch, seqlen, heads, head_dim).
        cos, sin: (seqlen_ro, rotary_dim / 2), floating-point.
        positions: int (batch, seqlen): the row of cos and sin for each token.
        interleaved: True pairs dimensions (0, 1), (2, 3), ... (GPT-J); False pairs (0, rotary_dim / 2),
            (1, rotary_dim / 2 + 1), ... (GPT-NeoX).

    Returns:
        (batch, seqlen, heads, head_dim), in the dtype of x.

    Raises:
        ValueError: shapes that do not fit together; on the CPU, positions past the end of cos and sin.

    Source: RoFormer (Su et al., 2021, arXiv:2104.09864), section 3.2.
    """
    if x.dim() != 4 or x.shape[:2] != positions.shape:
        raise ValueError(
            f"q or k to be rotated has shape {tuple(x.shape)}: must be (batch, seqlen, heads, head_dim), "
            f"beginning with {tuple(positions.shape)}"
        )
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}: must be equal, (seqlen_ro, "
            f"rotary_dim / 2), with rotary_dim up to head_dim, {x.shape[-1]}"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not table.dtype.is_floating_point or table.device != x.device:
            raise ValueError(f"{name} is {table.dtype} on {table.device}: must be floating-point on {x.device}")
    check_range("position in rotary_cos", positions, cos.shape[0])
    dtype = torch.promote_types(x.dtype, torch.float32)
    rotary, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    cos, sin = (table[positions.long()][:, :, None].to(dtype) for table in (cos, sin))
    # (..., rotary_dim / 2, 2) or (..., 2, rotary_dim / 2)
    pairs = rotary.to(dtype).unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], axis).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], -1)
