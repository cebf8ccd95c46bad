"""Each callback by itself, in somebody else's `Trainer`."""

import io
import json
import re
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from rich.console import Console
from tiny_run import Hook, TinyData, plain_trainer, read_metrics, tiny_module, tiny_trainer

from flash_train.training import (
    AtomicCheckpointIO,
    ClosingSample,
    NonFiniteLoss,
    RichProgress,
    RunRecord,
    SaveOnSignal,
    StepCheckpoint,
    StepResult,
    StepSeed,
    StepTimes,
    StopAfter,
    Throughput,
    newest_checkpoint,
)
from flash_train.training.callbacks import MemorySnapshot
from flash_train.training.callbacks.step_seed import step_seed


class Draws(pl.Callback):
    """The first random number of every training batch."""

    def __init__(self):
        self.numbers = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.numbers.append(torch.rand(()).item())


# -- everything in a foreign trainer


def test_all_of_it_in_a_plain_trainer(tmp_path):
    logger = CSVLogger(tmp_path, name="lightning")
    trainer = plain_trainer(
        tmp_path,
        *(StepSeed(0), NonFiniteLoss(), Throughput(), StopAfter(), SaveOnSignal(), RunRecord(tmp_path)),
        StepCheckpoint(tmp_path / "checkpoints", every=2),
        logger=logger,
        plugins=[AtomicCheckpointIO()],
        accumulate_grad_batches=2,
        max_steps=5,
    )
    trainer.fit(tiny_module(), datamodule=TinyData())
    ours = read_metrics(tmp_path)
    assert [int(row["step"]) for row in ours] == [1, 2, 3, 4, 5]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-000004.ckpt", "step-000005.ckpt"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert {"loss.png", "throughput.png", "memory.png"} <= {path.name for path in tmp_path.iterdir()}
    logged = [row for row in read_metrics(tmp_path / "lightning" / "version_0") if row["train/loss"]]
    for row, theirs in zip(ours, logged, strict=True):
        for name in ("train/loss", "train/gradient_norm", "train/learning_rate", "time/step_seconds"):
            assert float(theirs[name]) == pytest.approx(float(row[name]), rel=1e-6), name
    assert [int(row["step"]) for row in logged] == [int(row["step"]) for row in ours]
    assert {row["epoch"] for row in logged} == {"0"}
    for name in ("train/loss", "time/step_seconds"):  # for callbacks that monitor them
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(ours[-1][name]), rel=1e-6)


def test_module_logs_without_any_callback(tmp_path):
    trainer = plain_trainer(tmp_path, max_steps=2)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert {"train/loss", "train/gradient_norm"} <= set(trainer.callback_metrics)


def test_missing_or_misplaced_throughput(tmp_path):
    for callbacks in [(RunRecord(tmp_path),), (RunRecord(tmp_path), Throughput())]:
        with pytest.raises(ValueError, match="RunRecord needs Throughput before it"):
            plain_trainer(tmp_path, *callbacks).fit(tiny_module(), datamodule=TinyData())


# -- StepSeed


def test_step_seed_depends_on_everything_and_nothing_else(tmp_path):
    def numbers(seed, **options):
        draws = Draws()
        torch.manual_seed(time.time_ns() % 2**31)
        plain_trainer(tmp_path, StepSeed(seed), draws, **options).fit(tiny_module(), datamodule=TinyData())
        return draws.numbers

    first = numbers(0)
    assert len(set(first)) == 4
    # Two micro-batches a step, and validation in between, change nothing but how many there are.
    again = numbers(0, accumulate_grad_batches=2, val_check_interval=3, check_val_every_n_epoch=None)
    assert again[:4] == first
    assert len(set(again)) == 8
    assert set(numbers(1)).isdisjoint(first)
    assert len({step_seed(s, b, r) for s in range(3) for b in range(3) for r in range(3)}) == 27
    assert all(0 <= step_seed(0, batch, 0) < 2**63 for batch in range(100))


# -- Throughput and RunRecord


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
    assert len(set(flops)) > 1  # batches differ, so that a constant would not do
    seconds = 2 * throughput.row["time/step_seconds"]
    assert throughput.row["throughput/mfu"] == pytest.approx(sum(flops[2:]) / seconds / 1e9, rel=1e-6)


class Clock(pl.Callback):
    """A clock by which a step takes a second, and nothing else any time but what moves it."""

    now = 0.0

    def perf_counter(self):
        return Clock.now

    def on_after_backward(self, *arguments):
        Clock.now += 1


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
    monkeypatch.setattr("flash_train.training.callbacks.throughput.time", clock)
    trainer = plain_trainer(
        tmp_path, Throughput(), RunRecord(tmp_path), slow, clock,
        val_check_interval=1, check_val_every_n_epoch=None, max_steps=3, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert Clock.now > 3 * 60
    rows = read_metrics(tmp_path)
    assert [float(row["time/step_seconds"]) for row in rows] == [1, 1, 1]
    assert all(row["val/loss"] for row in rows)  # in the row of their step


def test_failed_run_leaves_its_record(tmp_path):
    def fail(trainer, pl_module):
        raise OSError("no space left")

    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path, {"corpus": "x"}), Hook(3, fail))
    with pytest.raises(OSError, match="no space left"):
        trainer.fit(tiny_module(), datamodule=TinyData())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "OSError: no space left")
    assert (summary["steps"], summary["corpus"]) == (3, "x")
    assert len(read_metrics(tmp_path)) == 3
    assert (tmp_path / "loss.png").exists()


def test_the_error_of_a_lost_device_is_not_hidden_by_its_next_one(tmp_path):
    def fail(trainer, pl_module):
        class Lost:
            def item(self):
                raise RuntimeError("device is gone")

        object.__setattr__(pl_module.last_step, "loss", Lost())
        raise RuntimeError("illegal memory access")

    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), Hook(3, fail))
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        trainer.fit(tiny_module(), datamodule=TinyData())
    assert raised.value.__notes__ == ["The run's record is not whole: device is gone"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: illegal memory access")
    assert summary["steps"] == 3


def test_run_that_never_began_keeps_the_earlier_record(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(tiny_module(), datamodule=TinyData())
    before = (tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()
    with pytest.raises(FileNotFoundError):
        tiny_trainer(tmp_path).fit(tiny_module(), datamodule=TinyData(), ckpt_path=tmp_path / "missing.ckpt")
    assert ((tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()) == before


def test_running_run_says_so(tmp_path):
    seen = []

    def look(trainer, pl_module):
        seen.append(json.loads((tmp_path / "summary.json").read_text())["status"])
        seen.append(len(read_metrics(tmp_path)))

    plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), Hook(2, look)).fit(tiny_module(), datamodule=TinyData())
    assert seen == ["running", 2]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_folder_of_wandb_is_one_of_the_run(mode, tmp_path):
    """What W&B names when it is disabled is a temporary folder, and none of the run's."""
    logger = WandbLogger(experiment=wandb.init(mode=mode, dir=tmp_path, settings=wandb.Settings(silent=True)))
    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), max_steps=1, logger=logger)
    trainer.fit(tiny_module(), datamodule=TinyData())
    logger.experiment.finish()
    folder = json.loads((tmp_path / "summary.json").read_text())["wandb_dir"]
    assert folder is None if mode == "disabled" else Path(folder).parent == tmp_path / "wandb"


def test_validate_only(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(tiny_module(), datamodule=TinyData())
    before = (tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    tiny_trainer(tmp_path).validate(tiny_module(), datamodule=TinyData(), ckpt_path=checkpoint, verbose=False)
    found = json.loads((tmp_path / "validation.json").read_text())
    assert (found["checkpoint"], found["steps"], found["seq_len"]) == (str(checkpoint), 2, 32)
    assert found["val_loss"] == json.loads(before[0])["val_loss"]
    assert ((tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()) == before


def test_a_validation_that_fails_is_no_failed_run(tmp_path):
    module = tiny_module()
    module.validation_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tiny_trainer(tmp_path).validate(module, datamodule=TinyData())
    assert not (tmp_path / "summary.json").exists()


# -- build_trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision=fp8 is unknown: it must be one of fp32, bf16-mixed, bf16-true, fp16-mixed"),
        ({"precision": "fp16-mixed"}, "precision=fp16-mixed needs an NVIDIA GPU: use bf16-mixed or fp32 here"),
        ({"max_steps": 0}, "max_steps=0 is out of range"),
        ({"accumulate": 0}, "accumulate=0 is out of range"),
    ],
)
def test_builder_refuses(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, **options)


def test_throughput_says_what_it_needs_of_a_module(tmp_path):
    class Own(pl.LightningModule):
        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = plain_trainer(tmp_path, Throughput())
    with pytest.raises(TypeError, match="reads flops and last_step of the module.*Own has not: leave the callback out"):
        trainer.fit(Own(), torch.utils.data.DataLoader(torch.ones(4, 2)))


HOOKS = (
    *("on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_end", "on_fit_end"),
)


def saving(hook: str, folder: Path) -> pl.Callback:
    """A callback that saves a checkpoint at every call of a hook, and takes a minute for it."""

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
    """Also before training begins and within a step, with `Throughput` called after the hook or before it."""
    clock, throughput, seconds = Clock(), Throughput(), []

    class Read(pl.Callback):
        def on_train_batch_end(self, *arguments):
            seconds.append(throughput.row["time/step_seconds"])

    monkeypatch.setattr("flash_train.training.callbacks.throughput.time", clock)
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


@pytest.mark.parametrize("callbacks", [(Throughput(),), ()], ids=["with Throughput", "alone"])
def test_loggers_have_losses_and_validations_at_the_steps_of_metrics_csv(callbacks, tmp_path):
    logger, bar = CSVLogger(tmp_path, name="csv"), TQDMProgressBar()
    record = (RunRecord(tmp_path),) if callbacks else ()
    trainer = plain_trainer(
        tmp_path, *callbacks, *record, logger=logger, max_steps=5, log_every_n_steps=2, accumulate_grad_batches=2,
        val_check_interval=4, check_val_every_n_epoch=None,
    )  # fmt: skip
    module = tiny_module()
    trainer.fit(module, datamodule=TinyData())
    rows = read_metrics(tmp_path / "csv" / "version_0")
    losses = {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}
    validations = {int(row["step"]): float(row["val/loss"]) for row in rows if row["val/loss"]}
    assert list(losses) == [2, 4, 5] and list(validations) == [2, 4]
    assert losses[5] == pytest.approx(module.last_step.loss.item(), rel=1e-6)
    if record:
        ours = read_metrics(tmp_path)
        assert losses == {int(row["step"]): pytest.approx(float(row["train/loss"]), rel=1e-6) for row in ours}
        own = {int(row["step"]): float(row["val/loss"]) for row in ours if row["val/loss"]}
        assert validations == pytest.approx(own, rel=1e-6)
    for name in ("train/loss", "val/loss"):  # what Lightning's own bars show, and what callbacks monitor
        assert name in bar.get_metrics(trainer, module) and name in trainer.callback_metrics
        assert float(trainer.logged_metrics[name]) == pytest.approx(float(trainer.callback_metrics[name]))


# -- modules of one's own


class Own(pl.LightningModule):
    """Another module: it has what `Throughput` reads, and logs a validation under its own name."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(31, 1)
        self.last_step = None

    def flops(self, batch):
        return 6 * batch["tokens"].numel()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch["tokens"]).square().mean()
        self.last_step = StepResult(self.global_step + 1, loss.detach(), torch.ones(()), 0.1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch["tokens"]).square().mean(), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_every_callback_takes_a_module_that_throughput_takes(tmp_path):
    screen = Console(file=io.StringIO(), force_terminal=False, width=110)
    trainer = plain_trainer(
        tmp_path,
        *(StepSeed(0), NonFiniteLoss(), StepTimes(), Throughput(), StopAfter(), SaveOnSignal(), RunRecord(tmp_path)),
        *(RichProgress(screen), ClosingSample(console=screen), StepCheckpoint(tmp_path / "c")),
        val_check_interval=2, check_val_every_n_epoch=None, plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    trainer.fit(Own(), datamodule=TinyData())
    shown = screen.file.getvalue()
    assert re.search(r"step 4/4  loss \d\.\d{4} .*left\nvalidation at step 4: loss \d\.\d{4}\n", shown), shown
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["model"], summary["parameters"]) == ("finished", "Own", 31)
    assert (summary["seq_len"], summary["attention"]) == (None, None)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows if row["val_loss"]] == ["2", "4"]
    assert summary["val_loss"] == float(rows[-1]["val_loss"])
    trainer.validate(Own(), datamodule=TinyData(), verbose=False)
    found = json.loads((tmp_path / "validation.json").read_text())
    assert found["val_loss"] > 0 and found["steps"] is None


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ((Throughput(), RunRecord("r"), RichProgress()), "Throughput reads flops and last_step of the module"),
        ((NonFiniteLoss(),), "NonFiniteLoss reads last_step of the module.*Bare has not: leave the callback out"),
        ((MemorySnapshot(print, every=1),), "MemorySnapshot reads model of the module"),
    ],
)
def test_callbacks_say_what_they_need_of_a_module(callbacks, message, tmp_path, monkeypatch):
    class Bare(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Embedding(31, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch["tokens"]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=message):
        plain_trainer(tmp_path, *callbacks).fit(Bare(), datamodule=TinyData())
