"""Throughput: rates, MFU, and which time does not count as training time."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from flash_train.training import AtomicCheckpointIO, RunRecord, SaveOnSignal, StepCheckpoint, StopAfter, Throughput
from flash_train.training.callbacks.clock import TrainingClock
from tests.support.training.tiny_run import Hook, RowSharing, TinyData, plain_trainer, read_metrics, tiny_module


def test_throughput_counts_exactly(tmp_path):
    """Rows every second step and at the last; rates that agree with each other."""
    throughput = Throughput()
    module = tiny_module()
    trainer = plain_trainer(
        tmp_path, throughput, RunRecord(tmp_path), max_steps=5, log_every_n_steps=2, accumulate_grad_batches=3
    )
    trainer.fit(module, datamodule=TinyData())
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == ["2", "4", "5"]
    for row in rows:
        tokens = float(row["throughput/tokens_per_second"]) * float(row["time/step_seconds"])
        assert tokens == pytest.approx(3 * 32, rel=1e-6)  # micro-batches times their tokens, per step
        assert 0 < float(row["time/data_wait_seconds"]) < float(row["time/step_seconds"])
        assert row["throughput/mfu"] == ""
        assert float(row["memory/process_peak_gib"]) > 0.05
    assert float(rows[-1]["train/loss"]) == module.last_step.loss.item()  # all digits


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize(
    ("end", "options"),
    [
        (lambda: [], {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3}),
        (lambda: [StopAfter(3)], {"max_steps": 9}),
        (lambda: [SaveOnSignal(), Hook(2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))], {"max_steps": 9}),
    ],
    ids=["epochs", "stop", "signal"],
)
def test_the_last_step_is_logged_however_training_ends(end, options, checkpoints, tmp_path):
    saver = [StepCheckpoint(tmp_path / "c", keep=1)] if checkpoints else []
    module, throughput = tiny_module(), Throughput()
    trainer = plain_trainer(tmp_path, throughput, *end(), RunRecord(tmp_path), *saver, log_every_n_steps=2, **options)
    trainer.fit(module, datamodule=TinyData())
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == ["2", "3"]
    assert float(rows[-1]["train/loss"]) == module.last_step.loss.item()
    tokens = throughput.row["throughput/tokens_per_second"] * throughput.row["time/step_seconds"]
    assert tokens == pytest.approx(32, rel=1e-6)


def test_mfu_is_flops_over_time_and_peak(tmp_path, monkeypatch):
    monkeypatch.setattr("flash_train.training.callbacks.throughput.known_peak", lambda *arguments: 1e9)
    throughput = Throughput()
    flops = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            flops.append(pl_module.flops(batch))

    plain_trainer(tmp_path, throughput, Count(), max_steps=4, log_every_n_steps=2).fit(
        tiny_module(), datamodule=TinyData()
    )
    assert len(set(flops)) > 1  # batches differ, so a constant would fail
    seconds = 2 * throughput.row["time/step_seconds"]
    assert throughput.row["throughput/mfu"] == pytest.approx(sum(flops[2:]) / seconds / 1e9, rel=1e-6)


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
def test_a_shared_row_counts_once_and_its_flops_are_divided(tmp_path, monkeypatch, data_ranks):
    monkeypatch.setattr("flash_train.training.callbacks.throughput.known_peak", lambda *arguments: 1e9)
    throughput, flops = Throughput(), []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            flops.append(pl_module.flops(batch))

    strategy = RowSharing(0, data_ranks, world_size=4)
    trainer = plain_trainer(tmp_path, throughput, Count(), max_steps=4, log_every_n_steps=2, strategy=strategy)
    trainer.fit(tiny_module(), datamodule=TinyData())
    seconds = throughput.row["time/step_seconds"]
    assert throughput.row["throughput/tokens_per_second"] == pytest.approx(32 * data_ranks / seconds, rel=1e-6)
    of_this_card = sum(flops[2:]) / (4 / data_ranks)
    assert throughput.row["throughput/mfu"] == pytest.approx(of_this_card / (2 * seconds) / 1e9, rel=1e-6)


@pytest.mark.parametrize("dealt", [True, False])
def test_the_imbalance_of_dealt_rows_is_logged(tmp_path, dealt):
    class Dealt(TinyData):
        @property
        def imbalance(self):
            return 1 + self.trainer.global_step / 8 if dealt else None

    plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), max_steps=3).fit(tiny_module(), datamodule=Dealt())
    rows = read_metrics(tmp_path)
    if dealt:
        assert [row["data/imbalance"] for row in rows] == ["1.125", "1.25", "1.375"]
    else:
        assert "data/imbalance" not in rows[0]


class Clock(pl.Callback):
    """A clock on which a backward pass takes one second, and only `Slow…` and saving take time otherwise."""

    now = 0.0

    def perf_counter(self):
        return Clock.now

    def on_after_backward(self, *arguments):
        Clock.now += 1


class FakeEvent:
    """An event of a device whose time is `Clock.now`; it is in the stream as soon as it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000 * (end.at - self.at)


def test_a_devices_clock_counts_to_the_mark_and_not_to_the_reading(monkeypatch):
    """The host may read a step's end long after the device has reached it, for example at the end of the next step."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    Clock.now = 5.0
    clock = TrainingClock(torch.device("cuda"))
    Clock.now = 7.0
    first = clock.mark()
    Clock.now = 17.0
    second = clock.mark()
    assert clock.read(first) == 2 and clock.read(second) == 12
    Clock.now = 18.0
    clock.pause()
    Clock.now = 78.0
    assert clock.mark() is None and clock.read(clock.mark()) == 13
    clock.resume(0.5)
    Clock.now = 79.0
    assert clock.read(clock.mark()) == 14.5


@pytest.mark.gpu
def test_rows_have_the_times_of_their_own_steps(tmp_path):
    """The host waits for the device within each step, so it queues a step only as fast as the device computes it."""
    busy = {2: 0.1, 3: 0.4, 4: 0.1}

    class Waits(pl.Callback):
        def on_after_backward(self, trainer, pl_module):
            seconds = busy.get(trainer.global_step + 1, 0.0)
            torch.cuda._sleep(int(seconds * 1.5e9))  # clock cycles, about 1.5 to 2 GHz
            torch.cuda.synchronize()

    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), Waits(), max_steps=4, accelerator="cuda")
    trainer.fit(tiny_module(), datamodule=TinyData())
    seconds = [float(row["time/step_seconds"]) for row in read_metrics(tmp_path)]
    assert 0.06 < seconds[1] < 0.2 and 0.25 < seconds[2] < 0.6 and 0.06 < seconds[3] < 0.2


class SlowValidation(pl.Callback):
    def on_validation_batch_start(self, *arguments):
        Clock.now += 60


class SlowCheckpoint(StepCheckpoint):
    def save(self, trainer):
        super().save(trainer)
        Clock.now += 60


@pytest.mark.parametrize("slow", [SlowValidation(), SlowCheckpoint("c", every=1)], ids=["validation", "checkpoint"])
def test_validation_and_checkpoints_are_not_training_time(slow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clock = Clock()
    monkeypatch.setattr("flash_train.training.callbacks.clock.time", clock)
    trainer = plain_trainer(
        tmp_path, Throughput(), RunRecord(tmp_path), slow, clock,
        val_check_interval=1, check_val_every_n_epoch=None, max_steps=3, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert Clock.now > 3 * 60
    rows = read_metrics(tmp_path)
    assert [float(row["time/step_seconds"]) for row in rows] == [1, 1, 1]
    assert all(row["val/loss"] for row in rows)  # in the row of their step


HOOKS = (
    *("on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_end", "on_fit_end"),
)


def saving(hook: str, folder: Path) -> pl.Callback:
    """A callback that saves a checkpoint in every call of `hook`, which takes a minute."""

    class SlowIO(AtomicCheckpointIO):
        def save_checkpoint(self, *arguments, **options):
            super().save_checkpoint(*arguments, **options)
            Clock.now += 60

    def save(self, trainer, pl_module, *rest):
        trainer.strategy.checkpoint_io = SlowIO()
        trainer.save_checkpoint(folder / "any.ckpt")

    return type("Saving", (pl.Callback,), {hook: save})()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_checkpoint_saved_in_any_hook_is_not_training_time(hook, first, tmp_path, monkeypatch):
    """Also before training begins and within a step, with `Throughput` before or after the saving callback."""
    clock, throughput, seconds = Clock(), Throughput(), []

    class Read(pl.Callback):
        def on_train_batch_end(self, *arguments):
            seconds.append(throughput.row["time/step_seconds"])

    monkeypatch.setattr("flash_train.training.callbacks.clock.time", clock)
    around = [saving(hook, tmp_path), throughput] if first else [throughput, saving(hook, tmp_path)]
    trainer = plain_trainer(
        tmp_path, *around, Read(), clock, val_check_interval=2, check_val_every_n_epoch=None, max_steps=5
    )
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert (tmp_path / "any.ckpt").exists()
    assert seconds == [1] * 5
    trainer.save_checkpoint(tmp_path / "after.ckpt")


def test_a_checkpoint_after_a_fit_that_failed_is_saved(tmp_path):
    trainer = plain_trainer(tmp_path, Throughput(), Hook(1, lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(tiny_module(), datamodule=TinyData())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()
