"""How the ranks of a run divide the weights and the rows: the sizes. It loads at once, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the two divisions of ``replicate * shard`` ranks; the divisions are independent of each other.

    Ranks are numbered node by node. So the ranks that share weights or a row are neighbours, in one node where they
    fit, and replicas are farthest apart.

    Attributes:
        replicate: how many copies of the weights there are.
        shard: how many neighbouring ranks share one copy of the weights.
        context: how many neighbouring ranks share one row.

    Raises:
        ValueError: a size below 1, or ``context`` does not divide the number of ranks.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"parallel.{name}={size}: must be an integer of 1 or more")
        if self.ranks % self.context:
            raise ValueError(f"parallel.context={self.context}: must divide the number of devices, {self.ranks}")

    @classmethod
    def of(
        cls, ranks: int, *, replicate: int | None = None, shard: int | None = None, context: int | None = None
    ) -> ParallelDims:
        """Complete the sizes for a number of ranks: without ``shard`` and ``replicate`` all ranks share the weights.

        Raises:
            ValueError: the sizes do not fit the number of ranks.
        """
        for name, size in (("replicate", replicate), ("shard", shard)):
            if size is not None and (size < 1 or ranks % size):
                raise ValueError(f"parallel.{name}={size}: must divide the number of devices, {ranks}")
        if shard is None:
            shard = ranks // (replicate or 1)
        if replicate is None:
            replicate = ranks // shard
        if replicate * shard != ranks:
            raise ValueError(
                f"parallel.replicate={replicate} parallel.shard={shard}: their product must be the number of "
                f"devices, {ranks}"
            )
        return cls(replicate, shard, context or 1)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def data_ranks(self) -> int:
        """How many different rows the ranks process at the same time."""
        return self.ranks // self.context

    def data_rank(self, rank: int) -> int:
        return rank // self.context

    def exchanges_gradients(self, precision: str, local_ranks: int) -> bool:
        """Whether sharded gradients are summed by `flash_train.distributed.gradient_sums`.

        Args:
            precision: Lightning's name.
            local_ranks: how many ranks a machine has.
        """
        return precision == "bf16-true" and self.replicate == 1 < self.shard and local_ranks % self.shard == 0


def data_share(strategy: Any | None) -> tuple[int, int]:
    """Return which share of the rows this process has, and how many shares a Lightning strategy makes.

    Ranks with the same share get the same rows. A strategy of several devices says so in Lightning's
    ``distributed_sampler_kwargs``; one without it has one device. Without a strategy, every rank has its own rows.
    """
    if strategy is None:
        from torch import distributed

        initialized = distributed.is_available() and distributed.is_initialized()
        return (distributed.get_rank(), distributed.get_world_size()) if initialized else (0, 1)
    share = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return share.get("rank", 0), share.get("num_replicas", 1)
