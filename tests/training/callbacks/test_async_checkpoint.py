"""Checkpoints that a thread writes while training continues."""

import errno
import os
import threading
import warnings

import lightning.pytorch as pl
import pytest
import torch

from flash_train.distributed.background import BackgroundWriter
from flash_train.training.callbacks import checkpoint as module
from flash_train.training.callbacks.checkpoint import checkpoints_by_step
from tests.support.training.tiny_run import TinyData, tiny_module, tiny_trainer

plain_save = module.write_archive


class HeldBack(pl.Callback):
    """The checkpoint of a step is written only once training has taken `more` steps after it."""

    def __init__(self, patch, step, more=1):
        self.step, self.more, self.go_on = step, more, threading.Event()
        patch.setattr(module, "write_archive", self.save)

    def save(self, checkpoint, file):
        assert threading.current_thread() is not threading.main_thread()
        if checkpoint["global_step"] == self.step:
            assert self.go_on.wait(120)
        plain_save(checkpoint, file)

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.step + self.more:
            self.go_on.set()


def fit(folder, *callbacks, **options):
    trainer = tiny_trainer(folder, callbacks=callbacks, **{"max_steps": 6, "checkpoint_every": 2} | options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        trainer.fit(tiny_module(), datamodule=TinyData())
    return [path.name for path in checkpoints_by_step(folder / "checkpoints")]


@pytest.mark.parametrize("step", [2, 4])
def test_a_checkpoint_holds_the_state_of_its_step(tmp_path, monkeypatch, step):
    names = fit(tmp_path / "sync", keep_checkpoints=None)
    held = HeldBack(monkeypatch, step)
    assert fit(tmp_path / "async", held, async_checkpoints=True, keep_checkpoints=None) == names
    for name in names:
        own, other = (
            torch.load(tmp_path / kind / "checkpoints" / name, weights_only=True) for kind in ("async", "sync")
        )
        assert own.keys() == other.keys()
        for part in ("state_dict", "lr_schedulers"):
            torch.testing.assert_close(own[part], other[part], rtol=0, atol=0)
        states = [each["optimizer_states"][0] for each in (own, other)]
        torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)
        assert states[0]["param_groups"] == states[1]["param_groups"]


def test_the_oldest_is_removed_once_the_newest_is_written(tmp_path, monkeypatch):
    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *arguments):
            seen[trainer.global_step] = [path.name for path in checkpoints_by_step(tmp_path / "checkpoints")]

    seen = {}
    callbacks = Look(), HeldBack(monkeypatch, 4, more=2)
    assert fit(tmp_path, *callbacks, async_checkpoints=True, keep_checkpoints=1) == ["step-000006.ckpt"]
    assert seen[5] == ["step-000002.ckpt"]


def test_a_full_disk_is_said_and_the_last_checkpoint_is_tried_again(tmp_path, monkeypatch, capsys):
    def full(checkpoint, file):
        if checkpoint["global_step"] > 2 and len(tried) < 2:
            tried.append(checkpoint["global_step"])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain_save(checkpoint, file)

    tried = []
    monkeypatch.setattr(module, "write_archive", full)
    names = fit(tmp_path, async_checkpoints=True, keep_checkpoints=1)
    assert tried == [4, 6] and names == ["step-000006.ckpt"]
    said = [line for line in capsys.readouterr().err.splitlines() if "not written" in line]
    assert said == [
        f"flash-train: {tmp_path}/checkpoints/step-00000{step}.ckpt not written (No space left on device); the run "
        "continues"
        for step in (4, 6)
    ]


def test_another_error_ends_the_run(tmp_path, monkeypatch):
    def broken(checkpoint, file):
        raise KeyError("a mistake in the writer")

    monkeypatch.setattr(module, "write_archive", broken)
    with pytest.raises(KeyError, match="a mistake in the writer"):
        fit(tmp_path, async_checkpoints=True)


def test_the_writer_raises_an_error_that_nobody_asked_for():
    def fail(copy):
        raise OSError("disk full")

    writer, value, found = BackgroundWriter(), torch.ones(3), []
    writer.start({"value": value}, found.append)
    value.zero_()
    assert writer.wait() is None and found[0]["value"].tolist() == [1, 1, 1]
    writer.start({}, fail)
    with pytest.raises(OSError, match="disk full"):
        writer.start({}, found.append)
    assert writer.wait() is None and len(found) == 1
    writer.close()


def test_the_thread_is_on_the_device_of_its_rank(monkeypatch):
    """On the first GPU, where a thread begins, each rank's writer took hundreds of megabytes for a context."""
    writer, devices = BackgroundWriter(), []
    monkeypatch.setattr(writer, "_copy", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((threading.current_thread(), device)))
    writer.start({}, lambda copy: devices.append((threading.current_thread(), "written")))
    assert writer.wait() is None
    (thread, device), written = devices
    assert (thread.name, device) == ("checkpoint", 3) and written == (thread, "written")
