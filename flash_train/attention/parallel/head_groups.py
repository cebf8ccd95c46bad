"""Into which groups the heads are divided, so that one group is exchanged while another is computed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

MOST_GROUPS = 8
#: Bytes that a rank receives for a group, at least. On NVLink an exchange takes about 0.07 ms plus its bytes at
#: 277 GiB/s (H100). Each group costs the host 0.5 ms or more, so rows with smaller exchanges have one group.
GROUP_BYTES = 128 * 2**20
SMALL = 4  #: a first or last group has GROUP_BYTES / SMALL: nothing is computed while it travels


class HeadGroup(NamedTuple):
    """Key heads, and the query heads that read them."""

    heads: slice
    kv_heads: slice


def head_groups(
    heads: int, kv_heads: int, transfer: int, group_bytes: int = GROUP_BYTES, *, sends_results: bool = False
) -> list[HeadGroup]:
    """Divide heads into groups: a small one first, and then groups of nearly equal size.

    Args:
        heads, kv_heads: of the attention; kv_heads divides heads.
        transfer: bytes of all heads that the rank with the largest exchange receives.
        group_bytes: bytes of a group, at least.
        sends_results: each group's results travel, too. The last group is then as small as the first.
    """
    small, ends = max(1, group_bytes // SMALL), 1 + sends_results
    bounds = [0, kv_heads]
    if transfer >= ends * group_bytes:
        first = math.ceil(kv_heads * small / transfer)
        last = max(first, kv_heads - first) if sends_results else kv_heads
        middle = transfer * (last - first) // kv_heads
        count = max(1, min(MOST_GROUPS - ends, middle // group_bytes))
        bounds = sorted({0, kv_heads, *(first + i * (last - first) // count for i in range(count + 1))})
    queries = heads // kv_heads
    return [HeadGroup(slice(a * queries, b * queries), slice(a, b)) for a, b in pairwise(bounds)]


def sinks_of(sinks: Tensor | None, heads: slice) -> Tensor | None:
    """Return the sinks of a group's heads, if there are sinks."""
    return None if sinks is None else sinks[heads]
