"""A run that was stopped at a validation runs it when resumed, and completes its record."""

import json
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from flash_train.records import MetricsTable
from flash_train.training import MissedValidation, RunRecord, SaveOnSignal, newest_checkpoint
from flash_train.training.callbacks.missed_validation import DUE
from tests.support.training.tiny_run import TinyData, read_metrics, tiny_module, tiny_trainer


class Killed(Exception):
    pass


class Kill(pl.Callback):
    """Stops a run at the second batch of its validation number `count`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.count -= batch_idx == 0
        if not self.count and batch_idx == 1:
            raise Killed


class Validations(pl.Callback):
    """The steps at which validations began."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


NAMES = ("step", "train/loss", "train/gradient_norm", "train/learning_rate", "val/loss")


def losses(run_dir):
    return [tuple(row.get(name, "") for name in NAMES) for row in read_metrics(run_dir)]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def fit(run_dir, *callbacks, resume=False, **options):
    options = {"val_every": 4, "checkpoint_every": 2, **options}
    trainer = tiny_trainer(run_dir, callbacks=callbacks, **options)
    checkpoint = newest_checkpoint(run_dir / "checkpoints") if resume else None
    trainer.fit(tiny_module(seed=999 if resume else 0), datamodule=TinyData(), ckpt_path=checkpoint)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    fit(run_dir)
    return run_dir


@pytest.mark.parametrize(("count", "steps"), [(1, [4, 8, 12]), (2, [8, 12]), (3, [12])])
def test_killed_validation_runs_after_resuming(count, steps, whole, tmp_path):
    """After the last validation no step is left, and the run's record is completed."""
    with pytest.raises(Killed):
        fit(tmp_path, Kill(count))
    (tmp_path / "loss.png").unlink()
    assert not losses(tmp_path)[-1][4]
    again = Validations()
    fit(tmp_path, again, resume=True)
    assert again.steps == steps
    assert losses(tmp_path) == losses(whole)
    closed, expected = summary(tmp_path), summary(whole)
    for name in ("status", "steps", "train_loss", "val_loss", "seq_len"):
        assert closed[name] == expected[name] is not None, name
    assert (tmp_path / "loss.png").is_file()


def test_validation_interrupted_by_a_signal_runs_after_resuming(whole, tmp_path):
    """At a step without a due checkpoint: the signal saves one."""

    class Signal(pl.Callback):
        def on_validation_batch_start(self, trainer, pl_module, *arguments):
            watch = next(callback for callback in trainer.callbacks if isinstance(callback, SaveOnSignal))
            watch._handle(15, None)

    fit(tmp_path, Signal(), checkpoint_every=3)
    assert newest_checkpoint(tmp_path / "checkpoints").name == "step-000004.ckpt"
    assert summary(tmp_path)["status"] == "interrupted"
    fit(tmp_path, resume=True)
    assert losses(tmp_path) == losses(whole)


def test_validation_requested_by_stop_after_runs_after_resuming(tmp_path):
    with pytest.raises(Killed):
        fit(tmp_path, Kill(1), stop_after=3)
    again = Validations()
    fit(tmp_path, again, stop_after=2, resume=True)
    assert again.steps == [3, 4, 5]
    assert [row[0] for row in losses(tmp_path) if row[4]] == ["3", "4", "5"]


def test_run_killed_after_its_last_validation_is_completed(whole, tmp_path, monkeypatch):
    """Its numbers are in metrics.csv, so nothing is computed again."""

    def kill(*arguments, **named):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("flash_train.training.callbacks.record.plot_run", kill)
        fit(tmp_path)
    again = Validations()
    trainer = fit(tmp_path, again, resume=True)
    assert again.steps == [] and trainer.global_step == 12
    assert losses(tmp_path) == losses(whole)
    assert {name: summary(tmp_path)[name] for name in ("status", "train_loss", "val_loss")} == {
        name: summary(whole)[name] for name in ("status", "train_loss", "val_loss")
    }


def test_finished_run_is_not_validated_again(tmp_path):
    fit(tmp_path, stop_after=4)
    again = Validations()
    fit(tmp_path, again, stop_after=1, resume=True)  # it was validated at 4
    assert again.steps == [5]
    fit(tmp_path, resume=True)
    before, again = (tmp_path / "summary.json").stat().st_mtime_ns, Validations()
    fit(tmp_path, again, resume=True)  # finished: there is nothing to do
    assert again.steps == [] and (tmp_path / "summary.json").stat().st_mtime_ns == before


def test_new_run_from_the_checkpoint_has_no_missed_validation(tmp_path):
    with pytest.raises(Killed):
        fit(tmp_path / "first", Kill(1))
    checkpoint = newest_checkpoint(tmp_path / "first" / "checkpoints")
    again = Validations()
    trainer = tiny_trainer(tmp_path / "second", val_every=4, stop_after=1, callbacks=[again])
    trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=checkpoint)
    assert again.steps == [5]


def test_a_run_that_never_validates_is_not_validated(tmp_path):
    trainer = tiny_trainer(tmp_path, limit_val_batches=0, stop_after=4, val_every=4)
    trainer.fit(tiny_module(), datamodule=TinyData())
    again = Validations()
    fit(tmp_path, again, limit_val_batches=0, resume=True)
    assert again.steps == [] and summary(tmp_path)["status"] == "finished"


def test_the_checkpoint_says_whether_a_validation_is_due(tmp_path):
    found = {}

    class Look(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            missed = next(callback for callback in trainer.callbacks if isinstance(callback, MissedValidation))
            missed.on_save_checkpoint(trainer, pl_module, checkpoint)
            found[trainer.global_step] = checkpoint[DUE]

    fit(tmp_path, Look(), checkpoint_every=1, stop_after=6)
    assert found == {1: False, 2: False, 3: False, 4: True, 5: False, 6: True}


def test_users_module_may_rename_its_validation_metric(tmp_path):
    record = RunRecord(tmp_path)
    record.table, record._is_resumed = MetricsTable(tmp_path / "metrics.csv", up_to_step=4), True
    assert record.lacks_validation(4)
    record.table.write(4, {"train/loss": 2.0})
    assert record.lacks_validation(4)
    record.table.write(4, {"val_loss": 3.0})
    assert not record.lacks_validation(4)
    loop = SimpleNamespace(_can_stop_early=True)
    stopping = SimpleNamespace(global_step=4, max_steps=9, should_stop=True, fit_loop=loop)
    checkpoint = {}
    MissedValidation().on_save_checkpoint(stopping, pl.LightningModule(), checkpoint)
    assert checkpoint == {"validation_due": True}


def test_missed_validation_needs_the_record(tmp_path):
    with pytest.raises(ValueError, match="MissedValidation needs RunRecord before it"):
        pl.Trainer(callbacks=[MissedValidation()], logger=False, enable_checkpointing=False, accelerator="cpu").fit(
            tiny_module(), datamodule=TinyData()
        )
