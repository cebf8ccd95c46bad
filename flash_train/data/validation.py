"""The documents and rows of a validation. They are the same in every run, so that runs can be compared."""

from dataclasses import dataclass

from flash_train.data.dataset import PackedRows
from flash_train.data.order.sampler import epoch_order
from flash_train.data.recall import RecallRows
from flash_train.data.split import Part, first_tokens

VAL_ORDER_SEED = 0  #: for the order of validation documents and rows, independent of the run's seed


@dataclass(frozen=True)
class Validated:
    """The size of a validation: tokens of documents, rows, and documents (None for synthetic rows)."""

    tokens: int
    rows: int
    documents: int | None


def validation_documents(held_out: Part, tokens: int | None) -> Part:
    """Return the documents of a validation on `tokens` tokens, in a fixed order; None for all held-out documents."""
    return held_out if tokens is None else first_tokens(held_out, tokens, epoch_order(len(held_out), VAL_ORDER_SEED, 0))


@dataclass(frozen=True)
class ValidationRows:
    """The rows of a validation.

    Args:
        rows: the packed rows of `validation_documents`, or synthetic rows.
        seq_len: tokens per row.
        tokens: use as many synthetic rows as hold these tokens, at least one; None for all.
        batches: maximum number of batches per rank; None for all.
    """

    rows: PackedRows | RecallRows
    seq_len: int
    tokens: int | None
    batches: int | None

    def indices(self, rows_per_batch: int) -> list[int]:
        """Return the rows in their order. All ranks together have `rows_per_batch` rows in a batch.

        The order is shuffled, so that the first few batches are a fair sample: packing sorts rows by length.
        """
        rows = epoch_order(len(self.rows), VAL_ORDER_SEED, 0).tolist()
        if self.tokens is not None and isinstance(self.rows, RecallRows):
            rows = rows[: max(1, self.tokens // self.seq_len)]
        return rows if self.batches is None else rows[: self.batches * rows_per_batch]

    def size(self, rows_per_batch: int) -> Validated:
        """Count what `indices` returns."""
        indices = self.indices(rows_per_batch)
        if isinstance(self.rows, RecallRows):
            return Validated(len(indices) * self.seq_len, len(indices), None)
        segments = [segment for index in indices for segment in self.rows.index.row(index)]
        documents = {document for document, _, _ in segments}
        return Validated(sum(length for _, _, length in segments), len(indices), len(documents))

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per predicted token over all rows; None for synthetic rows."""
        if isinstance(self.rows, RecallRows):
            return None
        part = self.rows.part
        return part.bytes / int(part.lengths.sum() - len(part))  # a document's first token is not predicted
