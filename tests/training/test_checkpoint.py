"""Checkpoints: which are kept, how they are written and read, and what is refused."""

import os

import pytest
import torch
from tiny_run import TinyData, tiny_module, tiny_trainer

from flash_train.training import AtomicCheckpointIO, StepCheckpoint, newest_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_retention_goes_by_time_not_by_step(tmp_path):
    """After going back to step 2, what is written last counts as newest, whatever steps lie ahead."""
    tiny_trainer(tmp_path, max_steps=8, checkpoint_every=2, keep_checkpoints=3).fit(
        tiny_module(), datamodule=TinyData()
    )
    folder = tmp_path / "checkpoints"
    assert names(folder) == [f"step-00000{i}.ckpt" for i in (4, 6, 8)]
    trainer = tiny_trainer(tmp_path, max_steps=8, checkpoint_every=1, keep_checkpoints=3, stop_after=1)
    trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=folder / "step-000004.ckpt")
    assert names(folder) == [f"step-00000{i}.ckpt" for i in (5, 6, 8)]
    assert newest_checkpoint(folder).name == "step-000005.ckpt"


def test_a_clock_set_back_costs_no_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".step-000100.ckpt.tmp").touch()  # a run was killed as it wrote
    for step in (100, 200):
        (folder / f"step-{step:06d}.ckpt").touch()
        os.utime(folder / f"step-{step:06d}.ckpt", (2**32, 2**32))
    tiny_trainer(tmp_path, max_steps=2, keep_checkpoints=2).fit(tiny_module(), datamodule=TinyData())
    assert names(folder) == ["step-000002.ckpt", "step-000200.ckpt"]


def test_no_checkpoint_found(tmp_path):
    (tmp_path / "step=3.ckpt").touch()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*: expected files named like step-000100.ckpt"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}])
def test_checkpoint_settings_out_of_range(options, tmp_path):
    with pytest.raises(ValueError, match="=0 is out of range: it must be 1 or greater, or null"):
        StepCheckpoint(tmp_path, **options)


def test_checkpoint_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a" / "x.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"value": torch.ones(3)}, path)

    def half(checkpoint, file):
        file.write(b"half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(torch, "save", half)
        io.save_checkpoint({"value": torch.zeros(3)}, path)
    assert io.load_checkpoint(path)["value"].tolist() == [1, 1, 1]
    assert [file.name for file in path.parent.iterdir()] == ["x.ckpt"]


def test_checkpoint_io_refuses(tmp_path):
    io = AtomicCheckpointIO()
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*missing.ckpt"):
        io.load_checkpoint(tmp_path / "missing.ckpt")
    with pytest.raises(TypeError, match="takes no storage_options"):
        io.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    torch.save({"callable": print}, tmp_path / "unsafe.ckpt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        io.load_checkpoint(tmp_path / "unsafe.ckpt", weights_only=False)
