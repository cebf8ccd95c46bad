"""Errors that end a training because of its data."""

from collections.abc import Mapping
from typing import Any

from torch import distributed


class DataError(ValueError):
    """Rows that training needs cannot be read, or ranks read different data. The message is one line."""


def check_equal_on_ranks(values: Mapping[str, Any]) -> None:
    """Compare values between the ranks of the running training, if there are several; all ranks call it together.

    Raises:
        DataError: names the first rank that differs from rank 0, and the values that do.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    found: list[Mapping[str, Any]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(found, dict(values))
    for rank, other in enumerate(found):
        differing = [name for name in values if other.get(name) != found[0].get(name)]
        if differing:
            pairs = (f"{name} {other.get(name)}, not {found[0].get(name)}" for name in differing)
            raise DataError(f"rank {rank} reads other data than rank 0: {'; '.join(pairs)}; give all ranks equal files")
