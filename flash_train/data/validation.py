"""The documents and rows of a validation. They are the same in every run, so that runs can be compared."""

from dataclasses import dataclass

from flash_train.data.order.sampler import epoch_order
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
