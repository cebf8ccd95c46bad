"""The division of ranks: which sizes are allowed, and who holds what."""

import pytest

from flash_train.distributed.dims import ParallelDims, data_share


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (1, 8, 1)),
        ({"shard": 4}, (2, 4, 1)),
        ({"replicate": 4}, (4, 2, 1)),
        ({"shard": 1, "context": 8}, (8, 1, 8)),
        ({"replicate": 2, "shard": 4, "context": 2}, (2, 4, 2)),
    ],
    ids=str,
)
def test_missing_sizes_follow_from_the_number_of_ranks(given, sizes):
    dims = ParallelDims.of(8, **given)
    assert (dims.replicate, dims.shard, dims.context) == sizes
    assert dims.ranks == 8 and dims.data_ranks == 8 // dims.context


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shard": 3}, "parallel.shard=3: must divide the number of devices, 8"),
        ({"replicate": 2, "shard": 2}, "parallel.replicate=2 parallel.shard=2: their product must be"),
        ({"shard": 0}, "parallel.shard=0: must divide the number of devices, 8"),
        ({"replicate": 16}, "parallel.replicate=16: must divide the number of devices, 8"),
        ({"context": 3}, "parallel.context=3: must divide the number of devices, 8"),
        ({"context": -1}, "parallel.context=-1: must be an integer of 1 or more"),
        ({"context": 2.0}, "parallel.context=2.0: must be an integer of 1 or more"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError) as error:
        ParallelDims.of(8, **given)
    assert str(error.value).startswith(message)


def test_neighbours_share_a_row():
    dims = ParallelDims(replicate=2, shard=4, context=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_one_device_has_every_row():
    assert data_share(object()) == (0, 1)
