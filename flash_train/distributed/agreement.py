"""Whether all ranks of a training have the same values."""

from collections.abc import Mapping
from typing import Any

from torch import distributed


def difference_between_ranks(values: Mapping[str, Any]) -> str | None:
    """Return which rank has other values than the first one, and which ones; None if all ranks have the same.

    All ranks call it together. Without a process group there is one rank.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    found: list[Mapping[str, Any]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(found, dict(values))
    for rank, other in enumerate(found):
        first = found[0]
        differing = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        pairs = [f"{name} {other.get(name)}, not {first.get(name)}" for name in sorted(differing)]
        if pairs:
            return f"rank {rank} has other values than rank 0: {'; '.join(pairs)}"
    return None
