"""The training rows of a data module in their order, and the samplers that read it."""

from typing import Any

import numpy as np

from flash_train.data.dataset import Batch, PackedRows, PlacedRows, collate
from flash_train.data.order.deal import Synchronise
from flash_train.data.order.sampler import DealtBatchSampler, EndlessBatchSampler, EndlessOrder, PlacedOrder
from flash_train.data.recall import RecallRows
from flash_train.data.stream import StreamedRows, StreamOrder

KEPT_IMBALANCES = 1024  # steps: more than workers load ahead


class TrainingOrder:
    """An endless order of training rows, a pure function of the seed.

    Args:
        rows: the data set.
        seq_len: tokens of a row.
        seed: of the order.
    """

    def __init__(self, rows: PackedRows | RecallRows | StreamedRows, *, seq_len: int, seed: int) -> None:
        self.rows, self.seq_len, self.seed = rows, seq_len, seed
        self._imbalances: dict[int, float] = {}  # of steps, by the place after their last row

    def batch(self, place: int, n: int) -> Batch:
        """Return the rows at the places ``place, …, place + n - 1`` as a batch with ``places``."""
        rows = PlacedRows(self.rows)
        return collate([rows[placed] for placed in self._order().rows(place, n)])

    def in_turn(self, batch_size: int, *, first_row: int, rank: int, world_size: int) -> EndlessBatchSampler:
        """Return a sampler that gives the rows to the ranks in turn."""
        return EndlessBatchSampler(self._order(), batch_size, rank=rank, world_size=world_size, first_row=first_row)

    def dealt(
        self,
        batch_size: int,
        *,
        row_cost: tuple[float, float],
        synchronise: Synchronise,
        accumulate: int,
        first_row: int,
        skipped: int,
        rank: int,
        world_size: int,
    ) -> DealtBatchSampler:
        """Return a sampler that deals the rows of each optimizer step by their cost, as `PackedDataModule` says."""
        rows, (per_token, per_square) = self.rows, row_cost
        assert not isinstance(rows, RecallRows)
        if isinstance(rows, StreamedRows):
            rows.keep_chunks(batch_size * world_size * accumulate)

        def costs(placed: list[tuple[int, Any]]) -> np.ndarray:
            squares = rows.squared_lengths([row for _, row in placed])
            return per_token * self.seq_len + per_square * squares.astype(np.float64)

        return DealtBatchSampler(
            self._order(),
            costs,
            batch_size,
            accumulate=accumulate,
            synchronise=synchronise,
            rank=rank,
            world_size=world_size,
            first_row=first_row,
            skipped=skipped,
            on_step=self._note_imbalance,
        )

    def imbalance(self, next_row: int) -> float | None:
        """Return the imbalance of the step that ends before the place `next_row`, if its rows are dealt."""
        return self._imbalances.get(next_row)

    def _order(self) -> PlacedOrder:
        if isinstance(self.rows, StreamedRows):
            return PlacedOrder(StreamOrder(self.rows, seed=self.seed))
        return PlacedOrder(EndlessOrder(len(self.rows), seed=self.seed, shuffle=isinstance(self.rows, PackedRows)))

    def _note_imbalance(self, next_row: int, imbalance: float) -> None:
        self._imbalances[next_row] = imbalance
        if len(self._imbalances) > KEPT_IMBALANCES:
            del self._imbalances[next(iter(self._imbalances))]
