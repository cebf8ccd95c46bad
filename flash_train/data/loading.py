"""Batches from rows. Every iteration makes a new DataLoader, which begins at the run's next batch."""

from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from flash_train.data.dataset import Batch, PackedRows, PlacedRows, collate
from flash_train.data.order.lightning_counts import EpochStart
from flash_train.data.order.sampler import DealtBatchSampler, EndlessBatchSampler, ShardedBatchSampler
from flash_train.data.recall import RecallRows
from flash_train.data.signals import leave_signals_to_main, started_without_signals


class BatchStream(IterableDataset):
    """Iterable over batches; each iteration calls `make_sampler` for the row indices of its batches.

    It is not a DataLoader: Lightning would replace a DataLoader's sampler by a DistributedSampler, and these samplers
    already distribute rows over ranks. It has a length if its sampler has one; with an endless sampler, `len` raises
    TypeError.

    Args:
        epoch_start: called by Lightning when an epoch begins.
        on_batch: called before each batch is yielded.
    """

    def __init__(
        self,
        rows: PackedRows | RecallRows | PlacedRows,
        make_sampler: Callable[[], EndlessBatchSampler | DealtBatchSampler | ShardedBatchSampler],
        num_workers: int = 0,
        epoch_start: EpochStart | None = None,
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        self.on_batch = on_batch
        self.rows, self.make_sampler, self.num_workers = rows, make_sampler, num_workers
        self.batch_sampler = epoch_start  # Lightning calls `set_epoch` of this attribute

    def as_dataloader(self) -> DataLoader:
        """Return a DataLoader with the same batches, for loops that need one.

        Its dataset is iterable, so Fabric and Lightning cannot replace its sampler.
        """
        return DataLoader(self, batch_size=None, collate_fn=_identity, generator=torch.Generator())

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the data module keeps the state. Lightning treats a loader with this method as resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing (see `state_dict`)."""

    def __len__(self) -> int:
        return len(cast("Sized", self.make_sampler()))

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.rows,
            batch_sampler=self.make_sampler(),
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=leave_signals_to_main,
            generator=torch.Generator(),  # otherwise starting an iteration would change the global random state
        )
        with started_without_signals() if self.num_workers else nullcontext():
            batches = iter(loader)
        for batch in batches:
            if self.on_batch is not None:
                self.on_batch()
            # In some versions of PyTorch, pinning turns a tuple into a list.
            yield {**batch, **{name: tuple(batch[name]) for name in ("lengths", "places") if name in batch}}


def _identity(batch: Any) -> Any:
    return batch
