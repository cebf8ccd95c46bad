"""Associative recall: synthetic rows with known answers, at any length.

A row first states pairs, then asks for their values:

    k1 v1 k2 v2 … kP vP  q1 q2 q3 …

The keys of a row are distinct; each query is one of them, and the label at a query is that key's value. The answers
themselves never appear after the pairs, so an answer can only come from the row's beginning, up to seq_len away. (The
task is multi-query associative recall of Arora et al., "Zoology", 2023, arXiv:2312.04927, with its gaps filled with queries.)
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from flash_train.data.dataset import IGNORE, PADDING_ROW, Row, as_row

STREAMS = {"train": 0, "val": 1}
ENDLESS = 2**62  # rows of the training stream: more than anyone will see
CAPACITY = 8  # a row is one entry


@dataclass(frozen=True)
class RecallCorpus:
    """Associative recall with `n_pairs` pairs to a row out of `n_keys` keys and `n_values` values.

    Token ids: keys are 0 … n_keys - 1, values the next n_values ids; they lie within a byte, so that any model that
    reads bytes can be trained on it. Raises ValueError for counts that cannot be.
    """

    n_pairs: int = 32
    n_keys: int = 64
    n_values: int = 64
    val_rows: int = 256
    name = "recall"

    def __post_init__(self) -> None:
        if not 1 <= self.n_pairs <= self.n_keys:
            raise ValueError(f"data.n_pairs={self.n_pairs}: allowed is 1 to n_keys={self.n_keys}, keys being distinct")
        if self.n_values < 1 or self.val_rows < 1 or self.n_keys + self.n_values > 256:
            raise ValueError(
                f"data.n_keys={self.n_keys}, n_values={self.n_values}, val_rows={self.val_rows}: "
                "allowed are values and rows ≥ 1 and n_keys + n_values ≤ 256"
            )

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess among the values."""
        return 1 / self.n_values

    def fingerprint(self) -> str:
        """What the rows are a function of, besides seq_len and the seed."""
        return f"recall-{self.n_pairs}-{self.n_keys}-{self.n_values}"


class RecallRows(Dataset):
    """Rows of associative recall, map-style: a pure function of (seed, stream, row). Fields as in `PackedRows`.

    Validation rows come from another stream than any training row. Raises ValueError if `seq_len` leaves no room for a
    query after the pairs.
    """

    def __init__(self, corpus: RecallCorpus, seq_len: int, seed: int, stream: Literal["train", "val"]) -> None:
        if seq_len <= 2 * corpus.n_pairs:
            raise ValueError(
                f"seq_len={seq_len}: data=recall needs more than 2 * n_pairs = {2 * corpus.n_pairs} tokens to a row"
            )
        self.corpus, self.seq_len, self.seed, self.stream = corpus, seq_len, seed, stream
        self.capacity = CAPACITY

    def __len__(self) -> int:
        return ENDLESS if self.stream == "train" else self.corpus.val_rows

    def __getitem__(self, row: int) -> Row:
        corpus = self.corpus
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        if row != PADDING_ROW:
            random = np.random.default_rng([self.seed, STREAMS[self.stream], row])
            n_pairs = corpus.n_pairs
            if self.stream == "train":
                n_pairs = math.ceil(n_pairs ** random.random())
            n_stated = 2 * n_pairs
            keys = random.permutation(corpus.n_keys)[:n_pairs]
            values = corpus.n_keys + random.integers(corpus.n_values, size=n_pairs)
            asked = random.integers(n_pairs, size=self.seq_len - n_stated)
            tokens[0:n_stated:2], tokens[1:n_stated:2], tokens[n_stated:] = keys, values, keys[asked]
            labels[n_stated:] = values[asked]
        return as_row(tokens, labels, [self.seq_len], self.capacity)


def recall_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the labelled positions whose largest logit is the label: (…, vocab) and (…,) → a number in [0, 1].

    Raises ValueError if nothing is labelled.
    """
    asked = labels != IGNORE
    if not asked.any():
        raise ValueError("labels: no position has a label, so there is no accuracy")
    return (logits[asked].argmax(-1) == labels[asked]).double().mean().item()
