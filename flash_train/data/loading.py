"""Batches out of rows: a DataLoader made anew, from where the run is, each time it is iterated."""

from collections.abc import Callable, Iterator, Sized
from typing import cast

import torch
from torch.utils.data import DataLoader

from flash_train.data.dataset import Batch, PackedRows, collate
from flash_train.data.recall import RecallRows
from flash_train.data.sampler import EndlessBatchSampler, ShardedBatchSampler
from flash_train.data.stream import StreamedRows, StreamSampler


class BatchStream:
    """Iterable over batches; `make_sampler` is asked for the batches' row indices whenever an iteration begins.

    Not itself a DataLoader: Lightning takes a DataLoader apart to put a DistributedSampler in, and these samplers know
    about ranks already. Has a length if its sampler has one; with an endless sampler, `len` raises TypeError.
    """

    def __init__(
        self,
        rows: PackedRows | RecallRows | StreamedRows,
        make_sampler: Callable[[], EndlessBatchSampler | ShardedBatchSampler | StreamSampler],
        num_workers: int = 0,
    ) -> None:
        self.rows, self.make_sampler, self.num_workers = rows, make_sampler, num_workers

    def __len__(self) -> int:
        return len(cast("Sized", self.make_sampler()))

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.rows,
            batch_sampler=self.make_sampler(),
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, or starting an iteration would move the global random state
        )
        for batch in loader:
            # Pinning makes a list of a tuple in some versions of PyTorch.
            yield {**batch, "lengths": tuple(batch["lengths"])}
