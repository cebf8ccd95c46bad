"""StepTimes: the parts add up, and attention counts once per pass, including recomputation."""

import csv
import json

import pytest
import torch

from flash_train.model import layers
from flash_train.training import StepTimes, Throughput
from flash_train.training.callbacks.base import find_callback
from tests.support.training.tiny_run import TinyData, tiny_config, tiny_module, tiny_trainer

PARTS = ("forward", "backward", "optimizer", "attention")


class Clock:
    """A clock that only `Slow` moves, because real times depend on the machine's other work."""

    now = 0.0


class Slow(torch.autograd.Function):
    """Takes one second in the forward, and two in the backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        Clock.now += 1
        ctx.save_for_backward(q)
        return q + k.sum() * 0 + v.sum() * 0

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors  # with activation checkpointing, the block is recomputed here
        Clock.now += 2
        zeros = grad.new_zeros(q.shape[0], 1, q.shape[2])
        return grad, zeros, zeros


@pytest.fixture
def slow_attention(monkeypatch):
    monkeypatch.setattr("flash_train.training.callbacks.step_times.DeviceClock.now", lambda clock: Clock.now)
    monkeypatch.setattr(layers, "attention", lambda q, k, v, *args, **options: Slow.apply(q, k, v))


def rows_of(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def fit(run_dir, *, memory="none", module_options=None, **options):
    options = {"max_steps": 3, "accumulate": 1, "step_times": True, "checkpoints": False, **options}
    trainer = tiny_trainer(run_dir, **options)
    trainer.fit(tiny_module(memory=memory, **(module_options or {})), datamodule=TinyData())
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parts_add_up_to_the_step(tmp_path, accumulate):
    fit(tmp_path, accumulate=accumulate, max_steps=4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    for row in rows_of(tmp_path)[1:]:
        forward, backward, optimizer, attention = (float(row[f"time/{part}_seconds"]) for part in PARTS)
        whole = float(row["time/step_seconds"])
        assert min(forward, backward, optimizer, attention) > 0
        assert attention < forward + backward
        assert forward + backward + optimizer + float(row["time/data_wait_seconds"]) <= whole
    assert {f"{part}_seconds" for part in (*PARTS, "step", "data_wait")} <= summary.keys()


@pytest.mark.parametrize(("memory", "passes"), [("none", 3), ("checkpoint", 4)])
def test_recomputed_attention_counts_twice(tmp_path, slow_attention, memory, passes):
    fit(tmp_path, memory=memory, max_steps=2)
    for row in rows_of(tmp_path):
        assert float(row["time/attention_seconds"]) == 2 * passes  # two layers
        assert float(row["time/forward_seconds"]) == 2
        assert float(row["time/backward_seconds"]) == 2 * (passes - 1)


def test_validation_does_not_count(tmp_path, slow_attention):
    fit(tmp_path, max_steps=4, val_every=2, module_options={"config": tiny_config(n_layers=1)})
    for row in rows_of(tmp_path):
        assert float(row["time/attention_seconds"]) == 3


def test_means_over_the_steps_between_two_rows(tmp_path, slow_attention):
    fit(tmp_path, max_steps=6, log_every=3)
    first, second = rows_of(tmp_path)
    for row in (first, second):
        assert float(row["time/attention_seconds"]) == 6


def test_step_times_do_not_change_the_run(tmp_path):
    losses = []
    for step_times in (False, True):
        for memory in ("none", "selective"):
            fit(tmp_path / f"{step_times}-{memory}", memory=memory, step_times=step_times)
            losses.append([row["train/loss"] for row in rows_of(tmp_path / f"{step_times}-{memory}")])
    assert losses[0] == losses[2] and losses[1] == losses[3]


def test_no_hooks_or_checkpoints_are_left(tmp_path):
    trainer = fit(tmp_path)
    hooked = [m for m in trainer.lightning_module.modules() if m._forward_hooks or m._backward_hooks]
    assert not hooked
    assert not (tmp_path / "checkpoints").exists() and not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["none", "selective", "checkpoint"])
def test_step_times_on_a_gpu(tmp_path, memory):
    fit(tmp_path, memory=memory, accelerator="cuda", log_every=2, max_steps=8)
    for row in rows_of(tmp_path)[1:]:
        forward, backward, optimizer, attention = (float(row[f"time/{part}_seconds"]) for part in PARTS)
        assert min(forward, backward, optimizer, attention) > 0
        assert attention < forward + backward
        assert forward + backward + optimizer <= 1.05 * float(row["time/step_seconds"])


def test_step_times_are_off_by_default(tmp_path):
    trainer = fit(tmp_path, step_times=False)
    assert find_callback(trainer, StepTimes) is None and find_callback(trainer, Throughput) is not None
    assert "time/forward_seconds" not in rows_of(tmp_path)[0]
