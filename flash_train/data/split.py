"""Splits a corpus into train and validation parts by a hash of each document's identity.

So a document stays in its part when other documents are added or removed.
"""

from dataclasses import dataclass

import numpy as np

from flash_train.checks import check, within
from flash_train.data.cache import TokenCache


@dataclass(frozen=True)
class Part:
    """Documents of one part, as ranges of a cache's tokens.

    begins, lengths: (documents,) int64; bytes: size of the text.
    """

    cache: TokenCache
    begins: np.ndarray
    lengths: np.ndarray
    bytes: int

    def __len__(self) -> int:
        return len(self.begins)

    def tokens(self, document: int, start: int, length: int) -> np.ndarray:
        """Return the tokens ``start : start + length`` of a document, a view of the cache."""
        begin = self.begins[document] + start
        return self.cache.tokens[begin : begin + length]


def split(cache: TokenCache, val_fraction: float) -> tuple[Part, Part]:
    """Return the (train, validation) parts; about `val_fraction` of the documents are for validation.

    Neither part is empty: with two or more documents, each part gets at least one. With a single document, the last
    `val_fraction` of its tokens is held out. Raises ValueError if `val_fraction` isn't between 0 and 1 (both excluded),
    or if the only document has fewer than four tokens.
    """
    check_val_fraction(val_fraction)
    if len(cache.keys) == 1:
        return _split_tail(cache, val_fraction)
    is_val = _is_val(cache, val_fraction)
    return _part(cache, ~is_val), _part(cache, is_val)


def train_part_after(first: TokenCache, cache: TokenCache, val_fraction: float) -> Part:
    """Return a later cache's training documents: all except copies of the documents held out from the `first` cache.

    May be empty.
    """
    held_out = first.keys if len(first.keys) == 1 else first.keys[_is_val(first, val_fraction)]
    return _part(cache, ~np.isin(cache.keys, held_out))


def _is_val(cache: TokenCache, val_fraction: float) -> np.ndarray:
    """Return whether each document is for validation: (documents,) bool."""
    is_val = cache.keys < np.uint64(val_fraction * 2**64)
    # In a tiny corpus a part could be empty: it gets the document with the nearest key, so only hashes decide.
    is_val[np.argmin(cache.keys)] = True
    is_val[len(cache.keys) - 1 - np.argmax(cache.keys[::-1])] = False  # a different one, even if all keys are equal
    return is_val


def first_tokens(part: Part, tokens: int, order: np.ndarray) -> Part:
    """Return documents of `part` in `order`, up to `tokens` (2 or more) tokens; the last one is cut to fit.

    So rows of every length hold the same text. `bytes` is estimated from the share of the part's tokens.
    """
    lengths = part.lengths[order]
    before = np.cumsum(lengths) - lengths
    chosen = before <= max(tokens - 2, 0)  # one token alone has no label
    lengths = np.minimum(lengths, tokens - before)[chosen]
    size = round(part.bytes * int(lengths.sum()) / int(part.lengths.sum()))
    return Part(part.cache, part.begins[order[chosen]], lengths, size)


def check_val_fraction(val_fraction: float) -> None:
    """Raise ValueError unless `val_fraction` is between 0 and 1, both excluded."""
    check("data.val_fraction", val_fraction, within(0, 1, "()"))


def _part(cache: TokenCache, chosen: np.ndarray) -> Part:
    begins = cache.offsets[:-1]
    return Part(cache, begins[chosen], np.diff(cache.offsets)[chosen], int(cache.sizes[chosen].sum()))


def _split_tail(cache: TokenCache, val_fraction: float) -> tuple[Part, Part]:
    total, size = int(cache.offsets[1]), int(cache.sizes[0])
    if total < 4:
        raise ValueError(f"the corpus is one document of {total} tokens: too few for training and validation")
    n_held_out = min(max(2, round(total * val_fraction)), total - 2)
    val_bytes = round(size * n_held_out / total)
    train = Part(cache, np.array([0]), np.array([total - n_held_out]), size - val_bytes)
    val = Part(cache, np.array([total - n_held_out]), np.array([n_held_out]), val_bytes)
    return train, val
