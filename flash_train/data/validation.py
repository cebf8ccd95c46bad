"""What a validation reads: the same documents and rows in every run, so that runs can be compared."""

from dataclasses import dataclass

from flash_train.data.sampler import epoch_order
from flash_train.data.split import Part, first_tokens

VAL_ORDER_SEED = 0  #: of validation documents and rows, whatever the run's seed


@dataclass(frozen=True)
class Validated:
    """What a validation read: tokens of documents, rows, and documents (None where the rows are made up)."""

    tokens: int
    rows: int
    documents: int | None


def read_for_validation(held_out: Part, tokens: int | None) -> Part:
    """The documents that a validation on `tokens` tokens reads, in a fixed order; None: all that are held out."""
    return held_out if tokens is None else first_tokens(held_out, tokens, epoch_order(len(held_out), VAL_ORDER_SEED, 0))
