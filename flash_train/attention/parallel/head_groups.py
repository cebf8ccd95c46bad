"""Into which groups the heads are divided, so that one group is exchanged while another is computed."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

MOST_GROUPS = 8
#: Bytes that a rank receives for a group, at least. On NVLink an exchange takes about 0.07 ms plus its bytes at
#: 277 GiB/s (H100). A group takes the host about 0.6 ms, longer than a GPU computes on a group of 16 MiB.
GROUP_BYTES = 64 * 2**20


class HeadGroup(NamedTuple):
    """Key heads, and the query heads that read them."""

    heads: slice
    kv_heads: slice


def head_groups(heads: int, kv_heads: int, transfer: int, group_bytes: int = GROUP_BYTES) -> list[HeadGroup]:
    """Divide heads into groups of nearly equal size.

    Args:
        heads, kv_heads: of the attention; kv_heads divides heads.
        transfer: bytes of all heads that the rank with the largest exchange receives.
        group_bytes: bytes of a group, at least.
    """
    count = max(1, min(kv_heads, MOST_GROUPS, transfer // group_bytes))
    bounds = [i * kv_heads // count for i in range(count + 1)]
    queries = heads // kv_heads
    return [HeadGroup(slice(a * queries, b * queries), slice(a, b)) for a, b in pairwise(bounds)]


def part(sinks: Tensor | None, heads: slice) -> Tensor | None:
    """Return the sinks of a group's heads, if there are sinks."""
    return None if sinks is None else sinks[heads]


def place(found: Tensor, whole: Tensor, heads: slice) -> Tensor:
    """Return ``whole`` with a group's heads in their place; if the group has all heads, return them without a copy."""
    if found.shape == whole.shape:
        return found
    whole[:, heads] = found
    return whole
