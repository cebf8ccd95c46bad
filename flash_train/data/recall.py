"""Associative recall: synthetic rows with known answers, at any length.

An episode first states pairs, then asks for their values:

    k1 v1 k2 v2 … kP vP  q1 q2 q3 …

The keys of an episode are distinct. Each query is one of them, and its label is the value of this key. Nothing else has
a label. Answers never appear after the pairs, so the model must look them up at the beginning of the episode. (This is
multi-query associative recall, Arora et al., "Zoology", arXiv:2312.04927, with queries in its gaps.)

A validation row is one episode of seq_len tokens. A training row is packed with episodes of one length, which is 16,
32, 64, … tokens or seq_len, all equally likely. The short episodes make the task quick to learn: with few tokens even
untrained attention gives each pair some weight, and the lookup learnt there works at any length. With long episodes
alone, a small model only learns to guess among the values of the row.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from flash_train.checks import as_integer
from flash_train.data.dataset import IGNORE_INDEX, PADDING_ROW, Row, as_row

STREAMS = {"train": 0, "val": 1}
ENDLESS = 2**62  # rows of the training stream: more than any run reads
SHORTEST = 16  # tokens of the shortest episode
TOKENS_PER_PAIR = 8  # in a short episode, at least: a pair has two tokens, so three quarters or more are queries


@dataclass(frozen=True)
class RecallCorpus:
    """Associative recall with `n_pairs` pairs per episode, from `n_keys` keys and `n_values` values.

    Token ids: keys are 0 … n_keys - 1, values are the next n_values ids. All are below 256, so every model for bytes
    can be trained on it. Raises ValueError for impossible counts.
    """

    n_pairs: int = 32
    n_keys: int = 64
    n_values: int = 64
    val_rows: int = 256
    name = "recall"

    def __post_init__(self) -> None:
        for name in ("n_pairs", "n_keys", "n_values", "val_rows"):
            object.__setattr__(self, name, as_integer(f"data.{name}", getattr(self, name), 1))
        if self.n_pairs > self.n_keys:
            raise ValueError(f"data.n_pairs={self.n_pairs}: must be from 1 to n_keys={self.n_keys}")
        if self.n_keys + self.n_values > 256:
            raise ValueError(f"data.n_keys={self.n_keys}, n_values={self.n_values}: must be 256 or less together")

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess among the values."""
        return 1 / self.n_values

    def fingerprint(self) -> str:
        """Return the settings that decide the rows, without seq_len and the seed."""
        return f"recall-{self.n_pairs}-{self.n_keys}-{self.n_values}"


class RecallRows(Dataset):
    """Map-style rows of associative recall: a pure function of (seed, stream, row). Fields as in `PackedRows`.

    Validation rows come from a separate stream. Raises ValueError if `seq_len` leaves no room for a query after the
    pairs.
    """

    def __init__(self, corpus: RecallCorpus, seq_len: int, seed: int, stream: Literal["train", "val"]) -> None:
        if seq_len <= 2 * corpus.n_pairs:
            raise ValueError(
                f"seq_len={seq_len}: must be greater than 2 * n_pairs = {2 * corpus.n_pairs} with data=recall"
            )
        self.corpus, self.seq_len, self.seed, self.stream = corpus, seq_len, seed, stream
        self.episode_lengths = [seq_len]
        if stream == "train":
            self.episode_lengths += [SHORTEST << i for i in range(math.ceil(math.log2(seq_len / SHORTEST)))]
        most_entries = -(-seq_len // min(self.episode_lengths))  # including the unused tail
        self.capacity = -(-most_entries // 8) * 8

    def __len__(self) -> int:
        return ENDLESS if self.stream == "train" else self.corpus.val_rows

    def __getitem__(self, row: int) -> Row:
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        if row == PADDING_ROW:
            return as_row(tokens, labels, [self.seq_len], self.capacity)
        random = np.random.default_rng([self.seed, STREAMS[self.stream], row])
        length = self.episode_lengths[random.integers(len(self.episode_lengths))]
        n_pairs = self.corpus.n_pairs
        if length < self.seq_len:
            n_pairs = min(n_pairs, length // TOKENS_PER_PAIR)
        episodes, tail = divmod(self.seq_len, length)
        for episode in range(episodes):
            span = slice(episode * length, (episode + 1) * length)
            tokens[span], labels[span] = self._episode(length, n_pairs, random)
        return as_row(tokens, labels, [length] * episodes + [tail] * (tail > 0), self.capacity)

    def _episode(self, length: int, n_pairs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw (tokens, labels) of one episode: int64 (length,) each."""
        keys = random.permutation(self.corpus.n_keys)[:n_pairs]
        values = self.corpus.n_keys + random.integers(self.corpus.n_values, size=n_pairs)
        queries = random.integers(n_pairs, size=length - 2 * n_pairs)
        pairs = np.stack([keys, values], axis=1).ravel()
        return np.concatenate([pairs, keys[queries]]), np.concatenate(
            [np.full(2 * n_pairs, IGNORE_INDEX), values[queries]]
        )


def recall_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of labelled positions whose largest logit is at the label: (…, vocab) and (…,) → [0, 1].

    Raises ValueError if no position has a label.
    """
    labelled = labels != IGNORE_INDEX
    if not labelled.any():
        raise ValueError("labels: no position has a label, so there is no accuracy")
    return (logits[labelled].argmax(-1) == labels[labelled]).double().mean().item()
