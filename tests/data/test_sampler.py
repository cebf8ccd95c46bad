from collections import Counter
from itertools import islice

import numpy as np
import pytest

from flash_train.data.dataset import PADDING_ROW
from flash_train.data.sampler import EndlessBatchSampler, ShardedBatchSampler, epoch_order


def test_a_batch_is_a_pure_function_of_its_number():
    one, other = (EndlessBatchSampler(10, 3, seed=1) for _ in range(2))
    forward = [one.batch(i) for i in range(20)]
    assert [other.batch(i) for i in reversed(range(20))] == forward[::-1]
    assert list(islice(one, 20)) == forward
    assert list(islice(EndlessBatchSampler(10, 3, seed=1, start_batch=7), 13)) == forward[7:]


def test_epochs_flow_into_one_another_and_each_is_a_permutation():
    stream = [row for batch in islice(EndlessBatchSampler(10, 3, seed=1), 20) for row in batch]
    epochs = [stream[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert stream != [row for batch in islice(EndlessBatchSampler(10, 3, seed=2), 20) for row in batch]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_stream_of_one(world_size):
    alone = EndlessBatchSampler(11, 2 * world_size, seed=1)
    ranks = [EndlessBatchSampler(11, 2, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    for i in range(12):
        assert sum((sampler.batch(i) for sampler in ranks), []) == alone.batch(i)


def test_batch_larger_than_the_data():
    stream = [row for batch in islice(EndlessBatchSampler(2, 5, seed=1), 4) for row in batch]
    assert Counter(stream) == {0: 10, 1: 10}


def test_unshuffled_rows_are_in_order():
    assert EndlessBatchSampler(2**62, 2, seed=1, rank=1, world_size=2, shuffle=False).batch(3) == [14, 15]


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
