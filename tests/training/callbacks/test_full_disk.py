"""The disk is full while a run writes its record: it prints a line and continues. Checkpoints: test_checkpoint.py."""

import errno
import json
import os

import lightning.pytorch as pl
import pytest

from flash_train.records.metrics import MetricsTable
from tests.support.training.tiny_run import TinyData, read_metrics, tiny_module, tiny_trainer


class Full(pl.Callback):
    """Between two steps, the disk is full for the record's files."""

    def __init__(self, patch: pytest.MonkeyPatch, start: int, end: int) -> None:
        self.patch, self.start, self.end = patch, start, end

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.start:
            self.patch.setattr("flash_train.files.os.replace", full)
            self.patch.setattr("flash_train.records.metrics.open", cut, raising=False)
        if trainer.global_step == self.end:
            self.patch.undo()


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class cut:
    """A file that writes half of every text, then raises."""

    def __init__(self, path, *arguments, **named):
        self.file = open(path, *arguments, **named)  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self.file.close()

    def write(self, text):
        self.file.write(text[: len(text) // 2])
        full()


NAMES = ("step", "train/loss", "train/gradient_norm", "train/learning_rate", "val/loss")


def losses(run_dir):
    return [tuple(row[name] for name in NAMES) for row in read_metrics(run_dir)]


@pytest.mark.parametrize("ends", [4, 100])
def test_rows_are_written_as_soon_as_there_is_room(ends, tmp_path, monkeypatch, capsys):
    """Half a row is dropped, and one line says what is wrong, even if several rows cannot be written."""
    through, run_dir = tmp_path / "through", tmp_path / "run"
    tiny_trainer(through, max_steps=6).fit(tiny_module(), datamodule=TinyData())
    trainer = tiny_trainer(run_dir, max_steps=6, checkpoints=False, callbacks=[Full(monkeypatch, 2, ends)])
    trainer.fit(tiny_module(), datamodule=TinyData())
    monkeypatch.undo()
    said = [line for line in capsys.readouterr().err.splitlines() if "not written" in line]
    words = "not written (No space left on device); the run continues"
    assert trainer.global_step == 6
    if ends == 4:
        assert said == [f"flash-train: {run_dir}: metrics.csv {words}"]
        assert losses(run_dir) == losses(through)
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
        assert (run_dir / "loss.png").is_file()
    else:
        assert said == [f"flash-train: {run_dir}: {name} {words}" for name in ("metrics.csv", "plots", "summary.json")]
        assert [*MetricsTable(run_dir / "metrics.csv").rows] == [1, 2]


def test_a_checkpoint_is_written_after_the_rows_up_to_it(tmp_path, monkeypatch):
    """Otherwise a run that is killed after the checkpoint would lose them."""

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, *arguments):
            if trainer.global_step == 5:  # 3 was the last logged step
                rows.append(max(MetricsTable(tmp_path / "metrics.csv").rows))

    rows = []
    callbacks = [Full(monkeypatch, 2, 3), Look()]
    trainer = tiny_trainer(tmp_path, max_steps=7, log_every=3, checkpoint_every=4, callbacks=callbacks)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert set(rows) == {3}
