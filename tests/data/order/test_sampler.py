from collections import Counter
from itertools import islice

import numpy as np
import pytest

from flash_train.data.dataset import PADDING_ROW
from flash_train.data.order.deal import deal, imbalance
from flash_train.data.order.sampler import (
    DealtBatchSampler,
    EndlessBatchSampler,
    EndlessOrder,
    ShardedBatchSampler,
    epoch_order,
)


def batches(n_rows: int, batch_size: int, seed: int = 1, **options) -> EndlessBatchSampler:
    return EndlessBatchSampler(EndlessOrder(n_rows, seed=seed), batch_size, **options)


def test_a_batch_is_a_pure_function_of_its_number():
    one, other = (batches(10, 3) for _ in range(2))
    forward = [one.batch(i) for i in range(20)]
    assert [other.batch(i) for i in reversed(range(20))] == forward[::-1]
    assert list(islice(one, 20)) == forward
    assert list(islice(batches(10, 3, first_row=21), 13)) == forward[7:]


def test_epochs_flow_into_one_another_and_each_is_a_permutation():
    stream = [row for batch in islice(batches(10, 3), 20) for row in batch]
    epochs = [stream[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert stream != [row for batch in islice(batches(10, 3, seed=2), 20) for row in batch]


@pytest.mark.parametrize("first_row", [0, 7])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_stream_of_one(world_size, first_row):
    alone = batches(11, 2 * world_size, first_row=first_row)
    ranks = [batches(11, 2, rank=rank, world_size=world_size, first_row=first_row) for rank in range(world_size)]
    for i in range(12):
        assert sum((sampler.batch(i) for sampler in ranks), []) == alone.batch(i)
    assert alone.batch(0) == EndlessOrder(11, seed=1).rows(first_row, 2 * world_size)


def test_batch_larger_than_the_data():
    stream = [row for batch in islice(batches(2, 5), 4) for row in batch]
    assert Counter(stream) == {0: 10, 1: 10}


def test_unshuffled_rows_are_in_order():
    order = EndlessOrder(2**62, seed=1, shuffle=False)
    assert EndlessBatchSampler(order, 2, rank=1, world_size=2).batch(3) == [14, 15]


def dealt_steps(costs, batch_size, world_size, accumulate, n_steps, *, first_row=0, skipped=0, on_step=None):
    """The batches of every rank, by step: [step][micro-batch][rank]."""
    n = n_steps * accumulate - skipped
    ranks = [
        islice(
            DealtBatchSampler(
                EndlessOrder(len(costs), seed=1),
                lambda rows: costs[rows],
                batch_size,
                accumulate=accumulate,
                synchronise="micro_batch",
                rank=rank,
                world_size=world_size,
                first_row=first_row,
                skipped=skipped,
                on_step=on_step,
            ),
            n,
        )
        for rank in range(world_size)
    ]
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), [(1, 4, 3), (3, 2, 1), (2, 2, 2), (1, 1, 5)])
@pytest.mark.parametrize("first_row", [0, 5])
def test_dealt_steps_have_the_rows_of_the_order(batch_size, world_size, accumulate, first_row):
    costs = np.random.default_rng([batch_size, world_size]).pareto(1, 17) + 1
    n = batch_size * world_size * accumulate
    found: dict[int, float] = {}
    micro_batches = dealt_steps(
        costs, batch_size, world_size, accumulate, 6, first_row=first_row, on_step=found.__setitem__
    )
    for step in range(6):
        rows = EndlessOrder(17, seed=1).rows(first_row + step * n, n)
        batches_of_step = micro_batches[step * accumulate : (step + 1) * accumulate]
        dealt = [[list(batch) for batch in ranks] for ranks in batches_of_step]
        assert sorted(np.ravel(dealt).tolist()) == sorted(rows)
        assert np.array_equal(np.array(rows)[deal(costs[rows], world_size, batch_size, "micro_batch")], dealt)
        sums = costs[np.array(dealt)].sum(-1)
        assert found[first_row + (step + 1) * n] == pytest.approx(sums.max(1).sum() / sums.mean(1).sum())


def test_a_dealt_step_continues_in_its_middle():
    costs = np.random.default_rng(3).random(40)
    whole = dealt_steps(costs, 2, 2, 3, 4, first_row=12)
    assert dealt_steps(costs, 2, 2, 3, 4, first_row=12, skipped=2) == whole[2:]
    assert dealt_steps(costs, 2, 2, 3, 3, first_row=24, skipped=1) == whole[4:]


def test_dealing_changes_the_order():
    costs = np.random.default_rng(3).random(40)
    given = [list(islice(batches(40, 1, rank=rank, world_size=2), 8)) for rank in range(2)]
    dealt = dealt_steps(costs, 1, 2, 8, 1)
    assert list(zip(*given, strict=True)) != dealt
    order, loads = np.arange(16).reshape(8, 2, 1), costs[EndlessOrder(40, seed=1).rows(0, 16)]
    assert imbalance(costs[np.array(dealt).ravel()], order, "micro_batch") < imbalance(loads, order, "micro_batch")


@pytest.mark.parametrize(
    ("n_rows", "batch_size", "world_size"), [(10, 3, 2), (12, 3, 2), (1, 4, 3), (7, 1, 1), (5, 2, 4)]
)
def test_each_row_goes_to_one_rank_and_ranks_have_equally_many_batches(n_rows, batch_size, world_size):
    rows = list(range(n_rows))
    samplers = [ShardedBatchSampler(rows, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    dealt = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in dealt} == {len(samplers[0])}
    assert {len(batch) for batches in dealt for batch in batches} == {batch_size}
    counted = Counter(row for batches in dealt for batch in batches for row in batch)
    padding = counted.pop(PADDING_ROW, 0)
    assert counted == dict.fromkeys(rows, 1) and padding == len(samplers[0]) * batch_size * world_size - n_rows


def test_orders_do_not_change_with_versions():
    assert epoch_order(8, seed=3, epoch=5).tolist() == [0, 6, 2, 1, 3, 4, 7, 5]
    assert np.array_equal(np.sort(epoch_order(1000, 0, 0)), np.arange(1000))
