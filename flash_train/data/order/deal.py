"""Deals the rows of an optimizer step to its micro-batches and ranks, so that ranks wait little for each other.

All rows have the same number of tokens, but attention's cost grows with the squares of their documents' lengths. Where
ranks synchronise in every micro-batch (FSDP, context parallelism), a step takes as long as the slowest rank of each
micro-batch together. Where they synchronise at the end of the step (DDP), it takes as long as the slowest rank.

The rule is greedy, longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969), with
equal numbers of rows. It changes only who computes a row and when, within one optimizer step. (WLB-LLM,
arXiv:2503.17924, balances micro-batches by packing documents into rows of different lengths instead.)
"""

from heapq import heapreplace
from typing import Literal, get_args

import numpy as np

from flash_train.checks import check_name

Synchronise = Literal["micro_batch", "step"]


def deal(costs: np.ndarray, ranks: int, batch_size: int, synchronise: Synchronise) -> np.ndarray:
    """Return which rows of an optimizer step each rank computes in each micro-batch.

    1. Sort the rows by cost and cut them into micro-batches, so that rows of similar cost are in the same one. With
       ``batch_size=1`` no other order has a smaller sum of the micro-batches' slowest ranks.
    2. Deal the rows of a micro-batch, costliest first: each goes to the share with the smallest sum that has room.
    3. Give the costliest share to the rank with the smallest sum so far, which balances the sums of the whole step.
    4. Keep the given order unless the new one has a smaller `imbalance`.

    The result is a pure function of the arguments, and all sums have a fixed order: every rank computes the same deal.

    Args:
        costs: the rows' costs in the given order, float64 (micro_batches * ranks * batch_size,), in any unit.
        ranks: how many ranks compute different rows.
        batch_size: rows of a rank in a micro-batch.
        synchronise: how often ranks wait for each other; see `imbalance`.

    Returns:
        Indices of `costs`, each once: int64 (micro_batches, ranks, batch_size).

    Raises:
        ValueError: `costs` do not fill micro-batches, or `synchronise` is unknown.
    """
    if len(costs) % (ranks * batch_size):
        raise ValueError(f"len(costs)={len(costs)}: must be a multiple of ranks * batch_size, {ranks * batch_size}")
    given = np.arange(len(costs)).reshape(-1, ranks, batch_size)
    balanced = _balance(costs, given.shape)
    is_better = imbalance(costs, balanced, synchronise) < imbalance(costs, given, synchronise)
    return balanced if is_better else given


def imbalance(costs: np.ndarray, order: np.ndarray, synchronise: Synchronise) -> float:
    """Return the predicted time of a step over its time on ranks that never wait: 1.0 or more.

    With ``synchronise="micro_batch"`` that is the sum over micro-batches of the slowest rank's cost, divided by the sum
    over micro-batches of the mean. With "step" it is the largest sum of a rank divided by the mean of the sums.

    Args:
        costs: float64 (rows,), positive.
        order: as `deal` returns it.

    Raises:
        ValueError: `synchronise` is unknown.
    """
    check_name("synchronise", synchronise, get_args(Synchronise))
    loads = _sum(costs[order])  # [micro_batches, ranks]
    if synchronise == "step":
        loads = _sum(loads.T)[None]  # [1, ranks]
    return float(_sum(loads.max(axis=1)) * loads.shape[1] / _sum(loads.ravel()))


def _balance(costs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    order = np.empty(shape, dtype=np.int64)
    sums = np.zeros(shape[1])
    similar = np.argsort(-costs, kind="stable").reshape(len(order), -1)
    for i, rows in enumerate(similar):
        shares = _shares(costs, rows, *shape[1:])
        shares = shares[np.argsort(-_sum(costs[shares]), kind="stable")]
        order[i, np.argsort(sums, kind="stable")] = shares
        sums += _sum(costs[order[i]])
    return order


def _shares(costs: np.ndarray, rows: np.ndarray, ranks: int, batch_size: int) -> np.ndarray:
    """Divide `rows`, costliest first, into shares of similar cost: (ranks, batch_size)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, share) for share in range(ranks)]
    for row, cost in zip(rows.tolist(), costs[rows].tolist(), strict=True):
        total, share = heap[0]
        shares[share].append(row)
        heapreplace(heap, (total + cost if len(shares[share]) < batch_size else np.inf, share))
    return np.array(shares)


def _sum(values: np.ndarray) -> np.ndarray:
    """Sum over the last axis from first to last; `np.sum` may add in another order on another CPU."""
    return np.cumsum(values, axis=-1)[..., -1]
