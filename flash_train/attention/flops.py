"""Analytic counts of the work an attention does, from the same masks the kernels run."""

from __future__ import annotations

from collections.abc import Iterable

from flash_train.attention.masks import Causal, Full


def attended_pairs(lengths: Iterable[int], causal: bool = True) -> int:
    """(query, key) pairs attended in self-attention over sequences of these lengths."""
    mask = Causal() if causal else Full()
    return sum(mask.pairs(n, n) for n in lengths)


def attention_flops(pairs: int, n_heads: int, head_dim: int) -> int:
    """Floating-point operations of one forward: two products of 2 * head_dim per attended pair and head.

    A backward does 2.5 times as many (five products, one of them the recomputed scores); model FLOPs, which leave
    recomputation out, count 2 times.
    """
    return 4 * pairs * n_heads * head_dim
