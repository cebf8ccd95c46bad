"""Rotation as a product of complex numbers, and random calls of `apply_rotary_emb`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OFFSETS = torch.tensor([3, 0, 5])
BOUNDARIES = torch.tensor([0, 4, 4, 11], dtype=torch.int32)  # the second entry is empty; two rows belong to none


@dataclass(frozen=True)
class Rotation:
    """A call: its tensor, its tables, what else it is given, and the position of each token."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    options: dict[str, Any]
    positions: Tensor


def rotations(dtype: torch.dtype, interleaved: bool, seed: int = 0) -> list[Rotation]:
    """Padded with one offset, padded with an offset for each row, and packed; tables that are no rotations."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for head_dim, half in ((8, 4), (10, 3)):
        cos, sin = (torch.randn(20, half, generator=draw).to(dtype) for _ in range(2))
        padded, packed = (torch.randn(*rows, 3, head_dim, generator=draw).to(dtype) for rows in ((3, 7), (13,)))
        steps = torch.arange(7).expand(3, 7)
        within = torch.tensor([3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 0, 0])
        for x, options, positions in (
            (padded, {"seqlen_offsets": 2}, steps + 2),
            (padded, {"seqlen_offsets": OFFSETS}, steps + OFFSETS[:, None]),
            (packed, {"seqlen_offsets": OFFSETS, "cu_seqlens": BOUNDARIES, "max_seqlen": 7}, within),
        ):
            found.append(Rotation(x, cos, sin, {"interleaved": interleaved, **options}, positions))
    return found


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Turn x (..., heads, head_dim) by rows of the tables; positions (...)."""
    half = cos.shape[1]
    turn = torch.complex(cos, sin)[positions][..., None, :]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    product = torch.complex(first, second) * turn
    parts = torch.stack([product.real, product.imag], -1)
    return torch.cat([(parts if interleaved else parts.transpose(-1, -2)).flatten(-2), rest], -1)
