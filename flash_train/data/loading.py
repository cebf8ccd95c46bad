"""Batches out of rows: a DataLoader made anew, from where the run is, each time it is iterated."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from flash_train.data.dataset import Batch, PackedRows, collate
from flash_train.data.progress import EpochStart
from flash_train.data.recall import RecallRows
from flash_train.data.sampler import EndlessBatchSampler, ShardedBatchSampler
from flash_train.data.signals import leave_signals_to_main, started_without_signals
from flash_train.data.stream import StreamedRows, StreamSampler


class BatchStream(IterableDataset):
    """Iterable over batches; `make_sampler` is asked for the batches' row indices whenever an iteration begins.

    Not itself a DataLoader: Lightning takes a DataLoader apart to put a DistributedSampler in, and these samplers know
    about ranks already. Has a length if its sampler has one; with an endless sampler, `len` raises TypeError.

    Args:
        epoch_start: called by Lightning as an epoch begins.
        on_batch: called as a batch is handed out.
    """

    def __init__(
        self,
        rows: PackedRows | RecallRows | StreamedRows,
        make_sampler: Callable[[], EndlessBatchSampler | ShardedBatchSampler | StreamSampler],
        num_workers: int = 0,
        epoch_start: EpochStart | None = None,
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        self.on_batch = on_batch
        self.rows, self.make_sampler, self.num_workers = rows, make_sampler, num_workers
        self.batch_sampler = epoch_start  # where Lightning looks for something to call as an epoch begins

    def as_dataloader(self) -> DataLoader:
        """A DataLoader of the same batches, for loops that take nothing else.

        Its dataset is iterable, so that nobody replaces the sampler: Fabric and Lightning do that to others.
        """
        return DataLoader(self, batch_size=None, collate_fn=_as_it_is, generator=torch.Generator())

    def state_dict(self) -> dict[str, Any]:
        """Nothing, as the data module keeps the state; by this method Lightning knows that the loader resumes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore (see `state_dict`)."""

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
            generator=torch.Generator(),  # its own, or starting an iteration would move the global random state
        )
        with started_without_signals():
            batches = iter(loader)
        for batch in batches:
            if self.on_batch is not None:
                self.on_batch()
            # Pinning makes a list of a tuple in some versions of PyTorch.
            yield {**batch, "lengths": tuple(batch["lengths"])}


def _as_it_is(batch: Any) -> Any:
    return batch
