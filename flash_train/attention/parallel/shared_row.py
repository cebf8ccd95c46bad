"""One rank's part of a packed row that the ranks of a process group share."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flash_train.attention.packing import Packing
from flash_train.attention.parallel.head_groups import GROUP_BYTES
from flash_train.attention.parallel.method_choice import Method, Sizes, choose_method
from flash_train.attention.parallel.row_plan import RowPlan

T = TypeVar("T")

# A PyTorch operator takes no process group and no plan, so it gets the number of a row that is in use.
_rows: weakref.WeakValueDictionary[int, SharedRow] = weakref.WeakValueDictionary()
_handles = itertools.count()


class SharedRow:
    """One rank's part of a row: the plan, the group, and the index tensors that every layer's attention reads.

    Make one for each batch.

    Args:
        plan: who holds which tokens; the same on all ranks.
        group: the ranks that share the row; rank i of the group holds ``plan.pieces[i]``.
        device: device of q, k and v.
        method: how ``shared_attention`` divides the work, unless its caller says so; ``auto`` is ``choose_method``.
        group_bytes: as for ``head_groups``.

    Attributes:
        handle: a number by which ``row_of`` finds the row.

    Raises:
        ValueError: a group of another size than the plan's.
    """

    def __init__(
        self,
        plan: RowPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        method: Method = "auto",
        *,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        if group.size() != plan.ranks:
            raise ValueError(f"the plan is for {plan.ranks} ranks and the group has {group.size()}: must be equal")
        self.plan, self.group, self.device, self.method = plan, group, device, method
        self.rank, self.group_bytes = group.rank(), group_bytes
        self.handle = next(_handles)
        self._cache: dict[Any, Any] = {}
        _rows[self.handle] = self

    def tensor(self, values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy to the device. Pinned memory lets the host go on; otherwise it would wait for all queued work."""
        found = torch.from_numpy(values).to(dtype)
        return (found.pin_memory() if self.device.type == "cuda" else found).to(self.device, non_blocking=True)

    def int32_tensor(self, values: np.ndarray) -> Tensor:
        return self.tensor(values, torch.int32)

    @cached_property
    def own_positions(self) -> Tensor:
        """The positions in the row of this rank's tokens, in the order in which it holds them; int64."""
        return self.tensor(self.plan.positions(self.rank))

    def own(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens: (seq_len, ...) to (seq_len / ranks, ...)."""
        return whole.index_select(0, self.own_positions)

    @cached_property
    def row_packing(self) -> Packing:
        """The boundaries of the whole row's documents."""
        cu = self.int32_tensor(np.array(self.plan.begins))
        return Packing(cu, cu, lengths=self.plan.lengths)

    @cached_property
    def own_packing(self) -> Packing:
        """The boundaries of this rank's tokens as one entry, for the checks of q, k and v."""
        cu = self.int32_tensor(np.array([0, self.plan.seq_len // self.plan.ranks]))
        return Packing(cu, cu)

    def choose_method(self, sizes: Sizes) -> Method:
        """Return the method that takes less time, computed once for each kind of layer."""
        if sizes not in self._cache:
            self._cache[sizes] = choose_method(self.plan, sizes)
        return self._cache[sizes]

    def cached(self, make: Callable[[SharedRow], T]) -> T:
        """Return ``make(self)``, computed at the first call."""
        if make not in self._cache:
            self._cache[make] = make(self)
        return self._cache[make]


def row_of(handle: int) -> SharedRow:
    """Return the row with this ``handle``, which is still in use."""
    return _rows[handle]
