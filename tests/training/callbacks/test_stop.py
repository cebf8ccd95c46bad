"""Runs that end early: after a number of steps, on a signal, at a nan or inf."""

import json
import os
import signal
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flash_train.training import (
    NonFiniteLoss,
    NonFiniteLossError,
    RunRecord,
    SaveOnSignal,
    StepCheckpoint,
    StopAfter,
    Throughput,
    newest_checkpoint,
)
from flash_train.training.callbacks.base import HostCopy
from flash_train.training.callbacks.stop import SAME_SIGNAL_SECONDS
from tests.support.training.tiny_run import Hook, TinyData, plain_trainer, read_metrics, tiny_module, tiny_trainer

# -- StopAfter, SaveOnSignal


def test_stop_after_validates_at_its_step(tmp_path):
    trainer = tiny_trainer(tmp_path, stop_after=3)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 3
    assert read_metrics(tmp_path)[-1]["val/loss"]
    with pytest.raises(ValueError, match="stop_after=0: must be an integer of at least 1, or null"):
        StopAfter(0)


def send(number):
    return Hook(2, lambda trainer, pl_module: os.kill(os.getpid(), number))


@pytest.mark.parametrize("callbacks", [[StopAfter(3)], [SaveOnSignal(), send(signal.SIGTERM)]])
def test_a_run_ends_before_the_trainers_least_steps(callbacks, tmp_path):
    checkpoints = StepCheckpoint(tmp_path / "c", keep=None)
    trainer = plain_trainer(tmp_path, *callbacks, checkpoints, min_steps=5, max_steps=8)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000003.ckpt"]
    assert (trainer.global_step, trainer.fit_loop.min_epochs, trainer.fit_loop.min_steps) == (3, 1, 5)


def test_a_stop_before_the_least_steps_saves_nothing(tmp_path):
    stop = Hook(2, lambda trainer, _: setattr(trainer, "should_stop", True))
    checkpoints = StepCheckpoint(tmp_path, keep=None)
    plain_trainer(tmp_path, stop, checkpoints, min_steps=5, max_steps=8).fit(tiny_module(), datamodule=TinyData())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008.ckpt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_fit_with_a_checkpoint(number, tmp_path, capfd):
    before = signal.getsignal(number)
    callbacks = SaveOnSignal()
    trainer = plain_trainer(
        tmp_path, Throughput(), callbacks, RunRecord(tmp_path), StepCheckpoint(tmp_path / "c"), send(number),
        accumulate_grad_batches=2, max_steps=100, val_check_interval=2, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert callbacks.received == signal.Signals(number).name
    assert newest_checkpoint(tmp_path / "c").name == "step-000003.ckpt"  # the current step was finished
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 3)
    assert not read_metrics(tmp_path)[-1]["val/loss"]  # no time is spent on validation
    assert signal.getsignal(number) == before
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "stopping" in line]
    again = "; press Ctrl-C again to interrupt at once" if number == signal.SIGINT else ""
    assert line == f"flash-train: {signal.Signals(number).name}: stopping after this step{again}"


UNSAVED = "a signal will end this run, maybe without a checkpoint: give the Trainer StepCheckpoint(folder), too"


@pytest.mark.parametrize("others", ["model", "both", "none"])
def test_a_line_says_that_a_stop_may_not_be_saved(others, tmp_path, capfd):
    """ModelCheckpoint with an interval of steps saves nothing when the run stops. Without any, nothing is expected."""
    theirs, ours = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=5), StepCheckpoint(tmp_path / "c")
    savers = {"model": [theirs], "both": [theirs, ours], "none": []}[others]
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=20, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, enable_checkpointing=bool(savers),
        callbacks=[SaveOnSignal(), *savers, send(signal.SIGTERM)],
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 3
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["step-000003.ckpt"] * (ours in savers)
    assert capfd.readouterr().err.count(f"flash-train: {UNSAVED}\n") == (others == "model")


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        callbacks = SaveOnSignal()
        trainer = plain_trainer(tmp_path, Throughput(), callbacks, send(signal.SIGHUP))
        trainer.fit(tiny_module(), datamodule=TinyData())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert callbacks.received is None and trainer.global_step == 4


def test_a_signal_before_the_first_step_ends_fit_without_an_error(tmp_path):
    """Lightning's handler catches it and raises after the first batch, before that step is saved."""

    class Early(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = plain_trainer(tmp_path, Early(), Throughput(), SaveOnSignal(), RunRecord(tmp_path))
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 0
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


def test_ctrl_c_delivered_twice_counts_once(tmp_path):
    """The terminal sends it to the whole group, and a wrapper such as `uv run` forwards it."""

    def twice(trainer, pl_module):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = plain_trainer(tmp_path, Throughput(), SaveOnSignal(), RunRecord(tmp_path), Hook(2, twice))
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 3


def test_signal_after_the_last_step_leaves_a_finished_run(tmp_path):
    class Late(pl.Callback):
        def on_validation_end(self, *arguments):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = plain_trainer(
        tmp_path, Throughput(), StopAfter(), SaveOnSignal(), Late(), RunRecord(tmp_path),
        val_check_interval=100, check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


def test_signal_handlers_are_restored(tmp_path):
    """The module can be validated, and trained again by the same trainer."""
    module, stop = tiny_module(), Hook(2, lambda trainer, pl_module: os.kill(os.getpid(), signal.SIGTERM))
    trainer = plain_trainer(tmp_path, Throughput(), SaveOnSignal(), RunRecord(tmp_path), stop, max_steps=100)
    trainer.fit(module, datamodule=TinyData())
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    assert trainer.global_step == 3
    (found,) = plain_trainer(tmp_path).validate(module, datamodule=TinyData(), verbose=False)
    assert found["val/loss"] > 0
    trainer.should_stop, trainer.fit_loop.epoch_loop.max_steps = False, 6
    trainer.fit(module, datamodule=TinyData())
    assert trainer.global_step == 6
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


def test_signal_cuts_validation_short(tmp_path):
    """Its metrics would cover a part of the data only: they are dropped, and training stops and saves at its step."""

    class InValidation(pl.Callback):
        batches = 0

        def on_validation_batch_start(self, trainer, *arguments):
            self.batches += 1
            if self.batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = plain_trainer(
        tmp_path, Throughput(), SaveOnSignal(), RunRecord(tmp_path), StepCheckpoint(tmp_path / "c"), InValidation(),
        max_steps=100, val_check_interval=2, check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert newest_checkpoint(tmp_path / "c").name == "step-000002.ckpt"
    assert [row["step"] for row in read_metrics(tmp_path)] == ["1", "2"]
    assert "val/loss" not in read_metrics(tmp_path)[0]
    assert json.loads((tmp_path / "summary.json").read_text())["val_loss"] is None


def test_second_ctrl_c_interrupts_at_once(tmp_path):
    def twice(trainer, pl_module):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SAME_SIGNAL_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    before = signal.getsignal(signal.SIGINT)
    trainer = plain_trainer(tmp_path, Throughput(), SaveOnSignal(), RunRecord(tmp_path), Hook(2, twice))
    try:
        with pytest.raises(SystemExit):  # Lightning exits so after a KeyboardInterrupt
            trainer.fit(tiny_module(), datamodule=TinyData())
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


# -- NonFiniteLoss


def poison(parameter_value):
    def apply(trainer, pl_module):
        with torch.no_grad():
            pl_module.model.norm.weight.fill_(parameter_value)

    return apply


def test_a_late_signal_does_not_undo_what_ranks_have_agreed_on(tmp_path):
    """With sharded weights all ranks skip a validation, or none: a rank alone would leave the others waiting."""
    seen = []

    def signals(trainer, module):
        callback._skips_alone = False  # as with sharded weights
        callback._handle(signal.SIGTERM, None)
        seen.append(module.skip_validation)
        callback._ask(trainer, module)  # they agree
        callback.received = "another rank's signal"
        callback._received_at -= 2 * SAME_SIGNAL_SECONDS
        callback._handle(signal.SIGTERM, None)
        seen.append(module.skip_validation)

    callback = SaveOnSignal()
    plain_trainer(tmp_path, callback, Hook(2, signals)).fit(tiny_module(), datamodule=TinyData())
    assert seen == [False, True]


def test_nan_loss_names_its_step(tmp_path):
    trainer = plain_trainer(
        tmp_path, NonFiniteLoss(), Throughput(), RunRecord(tmp_path), StepCheckpoint(tmp_path / "c", every=1),
        Hook(2, poison(float("nan"))), log_every_n_steps=100, max_steps=50, accumulate_grad_batches=2,
    )  # fmt: skip
    with pytest.raises(NonFiniteLossError, match="the training loss is nan at step 3:"):
        trainer.fit(tiny_module(), datamodule=TinyData())
    assert newest_checkpoint(tmp_path / "c").name == "step-000002.ckpt"  # nothing was saved after the nan
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "at step 3" in summary["error"]


class ReadsLater(NonFiniteLoss):
    """As on a GPU: a step is read at the end of the next one, or when a checkpoint is saved."""

    def on_step_end(self, trainer, pl_module):
        self.reads = 0
        super().on_step_end(trainer, pl_module)

    def _read(self, trainer):
        self.reads += 1
        if self.reads != 2:  # on a CPU the second one comes at the end of the step itself
            super()._read(trainer)


def test_nan_that_is_found_while_saving_leaves_no_checkpoint(tmp_path):
    checkpoints = StepCheckpoint(tmp_path, every=1, keep=1)
    trainer = plain_trainer(tmp_path, ReadsLater(), checkpoints, Hook(2, poison(float("nan"))))
    with pytest.raises(NonFiniteLossError, match="the training loss is nan at step 3:"):
        trainer.fit(tiny_module(), datamodule=TinyData())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002.ckpt"]


@pytest.mark.parametrize("stop", [{"max_steps": 3}, {"max_steps": 9, "stop_after": 3}])
def test_weights_that_the_last_step_ruins_fail_the_run(stop, tmp_path):
    """No later step's loss would tell."""

    def ruin(trainer, pl_module):  # before the validation of the last step
        if trainer.global_step == 3:
            poison(float("nan"))(trainer, pl_module)

    hook = pl.callbacks.LambdaCallback(on_validation_start=ruin)
    trainer = tiny_trainer(tmp_path, accumulate=1, val_every=1, callbacks=[hook], **stop)
    with pytest.raises(NonFiniteLossError, match="the validation loss is nan after step 3, the last one: lower opt"):
        trainer.fit(tiny_module(), datamodule=TinyData())
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_nan_that_an_earlier_fit_did_not_read_is_forgotten(tmp_path):
    """On a GPU a step is read at the end of the next one, which may fail before."""
    callback = NonFiniteLoss()
    callback._pending = 3, HostCopy(torch.tensor([float("nan"), 0.0, float("nan")]))
    trainer = plain_trainer(tmp_path, callback)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == trainer.max_steps


def test_infinite_gradient_names_its_step(tmp_path):
    def spoil(trainer, pl_module):
        pl_module.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))

    trainer = plain_trainer(tmp_path, NonFiniteLoss(), Hook(1, spoil))
    with pytest.raises(NonFiniteLossError, match=r"the gradient norm is (inf|nan) at step 2 \(its loss is \d"):
        trainer.fit(tiny_module(), datamodule=TinyData())
