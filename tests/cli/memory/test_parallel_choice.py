"""What `parallel=auto` chooses by the predicted memory."""

from dataclasses import replace

import pytest
import torch

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.validate import validate
from flash_train.cli.memory import check, parallel_choice
from flash_train.model import ModelConfig
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=512, n_layers=6, width=256, n_heads=4, n_kv_heads=2, head_dim=64, mlp_width=704, tied_embeddings=False
)


def config_of(*overrides: str):
    hardware = "cuda" if "precision=fp16-mixed" in overrides else "cpu"
    config = compose_config([f"hardware={hardware}", "memory=checkpoint", *overrides])
    validate(config)
    return config


def step_for(config, **changes) -> Step:
    """The configuration's step, with a small model and the kernels of a GPU."""
    step = Step(
        MODEL, config.seq_len, batch_size=config.batch_size, precision=config.precision, memory=config.memory.mode,
        accumulate=parallel_plan(config).accumulate, dims=parallel_plan(config).dims, method=config.parallel.method,
    )  # fmt: skip
    return replace(step, **changes)


def sizes(plan) -> tuple[int, int, int]:
    return plan.dims.replicate, plan.dims.shard, plan.dims.context


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("trainer.devices=8", [(8, 1, 1), (1, 8, 1), (1, 8, 2), (1, 8, 4), (1, 8, 8)]),
        ("trainer.devices=8 parallel.method=ulysses", [(8, 1, 1), (1, 8, 1), (1, 8, 2), (1, 8, 4)]),  # 4 heads
        ("trainer.devices=6", [(6, 1, 1), (1, 6, 1), (1, 6, 2)]),
        ("trainer.devices=4 seq_len=1022", [(4, 1, 1), (1, 4, 1), (1, 4, 2)]),
        ("trainer.devices=4 parallel.context=2", [(4, 1, 2), (1, 4, 2)]),
        ("trainer.devices=4 precision=fp16-mixed", [(4, 1, 1), (4, 1, 2), (4, 1, 4)]),
        ("trainer.devices=2 trainer.num_nodes=2", [(4, 1, 1), (1, 4, 1), (1, 4, 2), (1, 4, 4)]),
    ],
)
def test_possible_plans_are_ordered_by_how_much_they_divide(overrides, expected):
    config = config_of(*overrides.split())
    plans = list(parallel_choice.possible_plans(config, step_for(config)))
    assert [sizes(plan) for plan in plans] == expected
    assert {plan.global_batch for plan in plans} == {parallel_plan(config).global_batch}


@pytest.mark.parametrize(
    "overrides", ["trainer.devices=4 seq_len=8192", "trainer.devices=4 global_batch=8 seq_len=8192"]
)
def test_auto_takes_the_first_plan_that_fits(overrides, monkeypatch, capsys):
    config = config_of(*overrides.split())
    step = step_for(config)
    plans = list(parallel_choice.possible_plans(config, step))
    peaks = [predict(parallel_choice.of_plan(step, plan)).peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    for number, peak in enumerate(peaks):
        monkeypatch.setattr(parallel_choice, "memory_of_rank", lambda *_, limit=peak: limit)
        assert parallel_choice.choose_plan(config, step, CPU) == plans[number]
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("parallel: 4 devices, ") and " on each device" in line
        assert line.count("whole weights") == 1 and ("too much" in line) == (number > 0)
    monkeypatch.setattr(parallel_choice, "memory_of_rank", lambda *_: peaks[-1] - 1)
    assert parallel_choice.choose_plan(config, step, CPU) == plans[-1]


def test_a_plan_that_the_user_gives_stays(monkeypatch, capsys):
    monkeypatch.setattr(parallel_choice, "memory_of_rank", lambda *_: 1)
    for given in ("parallel=ddp", "parallel=fsdp", "parallel=context", "parallel.shard=2"):
        config = config_of("trainer.devices=4", given)
        plan = parallel_plan(config)
        assert parallel_choice.choose_plan(config, step_for(config), CPU) == plan
        rows = "1 row" if plan.global_batch == 1 else f"{plan.global_batch} rows"
        assert capsys.readouterr().out.endswith(f", {rows} a step\n")


def test_attention_that_draws_its_own_dropout_is_not_shared():
    config = config_of("trainer.devices=2", "seq_len=8192")
    model = replace(MODEL, attention_dropout=0.1)
    for attention, largest in (("sdpa", 1), ("flash", 2), ("standard", 2)):
        step = step_for(config, model=model, attention=attention)
        assert max(plan.dims.context for plan in parallel_choice.possible_plans(config, step)) == largest
    config = config_of("trainer.devices=2", "parallel=context")
    with pytest.raises(UsageError, match=r"^parallel.context=2: attention=sdpa .*; allowed: attention=flash"):
        parallel_choice.choose_plan(config, step_for(config, model=model, attention="sdpa"), CPU)


def test_heads_that_cannot_be_shared_are_a_mistake():
    config = config_of("trainer.devices=8", "parallel=context", "parallel.method=ulysses")
    with pytest.raises(UsageError, match=r"^parallel.context=8: .*model.n_heads=4.*; allowed: parallel.method=gather$"):
        parallel_choice.choose_plan(config, step_for(config), CPU)


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.devices=4 seq_len=8192 parallel=ddp",
        "trainer.devices=4 seq_len=8192 parallel=fsdp accumulate=3",
        "trainer.devices=4 seq_len=8192 global_batch=8 parallel=fsdp",
        "trainer.devices=4 seq_len=8192 parallel=ddp parallel.context=2",
        "trainer.devices=4 seq_len=8192 parallel.shard=2 parallel.replicate=2",
    ],
)
def test_the_plan_in_the_message_is_the_first_that_fits(overrides, monkeypatch):
    """The proposed overrides are followed: they give the plan that was meant, and the same rows in a step."""
    config = config_of(*overrides.split())
    step, plan = step_for(config), parallel_plan(config)
    others = list(parallel_choice.other_plans(config, step, plan))
    assert others
    for setting, other in others:
        peak = predict(other).peak_bytes
        first = next(words for words, possible in others if predict(possible).peak_bytes <= peak)
        assert check.advice(step, peak, True, others) == f"{first} would fit"
        kept = [
            word for word in overrides.split() if not word.startswith("accumulate=") or "accumulate=" not in setting
        ]
        chosen = parallel_plan(config_of(*kept, *setting.split()))
        assert (chosen.dims, chosen.accumulate) == (other.dims, other.accumulate)
        assert chosen.global_batch == plan.global_batch


def test_with_the_last_plan_further_settings_are_tried():
    config = config_of("trainer.devices=4", "seq_len=8192", "parallel=ddp")
    step = step_for(config, memory="none", batch_size=2)
    others = list(parallel_choice.other_plans(config, step, parallel_plan(config)))
    (last, least) = others[-1]
    limit = predict(replace(least, memory="checkpoint")).peak_bytes
    assert check.advice(step, limit, True, others) == f"{last} memory=checkpoint would fit"
    smaller = replace(least, memory="checkpoint", batch_size=1, accumulate=8)
    text = check.advice(step, predict(smaller).peak_bytes, True, others)
    assert text == "parallel=context memory=checkpoint batch_size=1 accumulate=8 would fit"
