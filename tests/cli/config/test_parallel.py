"""The plan of a run on several devices, as its configuration describes it."""

import pytest

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.validate import validate


def plan(*overrides):
    config = compose_config(["hardware=cpu", *overrides])
    validate(config)
    return parallel_plan(config)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ((), (1, 1, 1)),
        (("trainer.devices=8",), (8, 1, 1)),
        (("trainer.devices=8", "parallel=ddp"), (8, 1, 1)),
        (("trainer.devices=8", "trainer.strategy=ddp"), (8, 1, 1)),
        (("trainer.devices=8", "parallel=fsdp"), (1, 8, 1)),
        (("trainer.devices=8", "trainer.num_nodes=4", "parallel=fsdp", "parallel.shard=8"), (4, 8, 1)),
        (("trainer.devices=8", "parallel=context"), (1, 8, 8)),
        (("trainer.devices=8", "parallel.shard=8", "parallel.context=8"), (1, 8, 8)),
        (("trainer.devices=2", "parallel.replicate=2", "parallel.shard=1", "parallel.context=2"), (2, 1, 2)),
        (("trainer.devices=8", "parallel=context", "parallel.context=2"), (1, 8, 2)),
        (("trainer.devices=4", "parallel.replicate=2"), (2, 2, 1)),
    ],
    ids=str,
)
def test_sizes(overrides, sizes):
    dims = plan(*overrides).dims
    assert (dims.replicate, dims.shard, dims.context) == sizes


def test_auto_is_open_until_the_memory_is_known():
    assert plan("trainer.devices=2").is_open and plan("trainer.devices=2", "parallel.context=2").is_open
    assert not any(plan("trainer.devices=2", given).is_open for given in ("parallel=ddp", "parallel.shard=2"))
    assert not plan().is_open


@pytest.mark.parametrize(
    ("overrides", "accumulate", "rows"),
    [
        ((), 1, 1),
        (("accumulate=3", "batch_size=2"), 3, 6),
        (("global_batch=12", "batch_size=2"), 6, 12),
        (("global_batch=12", "trainer.devices=2"), 6, 12),
        (("global_batch=12", "trainer.devices=4", "parallel.context=4"), 12, 12),
    ],
    ids=str,
)
def test_rows_in_a_step(overrides, accumulate, rows):
    found = plan(*overrides)
    assert (found.accumulate, found.global_batch) == (accumulate, rows)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("trainer.devices=2 parallel=none", "parallel=none: there are 2 devices; allowed: auto, ddp, fsdp, context"),
        ("trainer.devices=2 parallel=fsdp trainer.strategy=ddp", "trainer.strategy=ddp parallel=fsdp: they differ"),
        ("trainer.devices=2 parallel=ddp parallel.shard=2", "parallel.shard=2: parallel=ddp keeps whole weights"),
        ("trainer.devices=4 parallel.context=3", "parallel.context=3: must divide the number of devices, 4"),
        ("trainer.devices=4 parallel.shard=3", "parallel.shard=3: must divide the number of devices, 4"),
        (
            "trainer.devices=4 parallel.shard=2 parallel.replicate=4",
            "parallel.replicate=4 parallel.shard=2: their",
        ),
        ("trainer.devices=4 parallel=context seq_len=1022", "parallel.context=4: must divide the tokens of a batch"),
        ("global_batch=3 accumulate=3", "global_batch=3 accumulate=3: allowed: one of them"),
        (
            "trainer.devices=2 global_batch=5",
            "global_batch=5: must be a multiple of the 2 rows that batch_size=1 gives 2",
        ),
        (
            "trainer.devices=2 parallel=ddp parallel.check=true precision=fp16-mixed",
            "parallel.check=true precision=fp16-mixed: allowed: bf16-mixed",
        ),
        ("parallel.method=ring", "parallel.method=ring: must be"),
        ("parallel.shard=0", "parallel.shard=0: must be 1 or more"),
    ],
)
def test_plans_that_cannot_work(overrides, message):
    with pytest.raises(UsageError) as error:
        plan(*overrides.split())
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_loss_scaling_needs_whole_weights():
    config = compose_config(["hardware=cuda", "trainer.devices=2", "parallel=fsdp", "precision=fp16-mixed"])
    with pytest.raises(UsageError, match="precision=fp16-mixed: sharded weights need another; allowed: bf16-mixed"):
        parallel_plan(config)
