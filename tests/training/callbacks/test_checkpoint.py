"""Checkpoints: which ones are kept, how they are written and read, and what is refused."""

import errno
import io
import os
import random

import lightning.pytorch as pl
import pytest
import torch

from flash_train.distributed.checkpoint import write_archive
from flash_train.training import AtomicCheckpointIO, CausalLMModule, StepCheckpoint, newest_checkpoint
from tests.support.training.tiny_run import TinyData, packed_row, tiny_module, tiny_trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_branch_is_resumed_after_resuming_an_earlier_step(tmp_path):
    """Checkpoints of later steps stay, but the newest one belongs to the resumed branch, whatever the files' times."""
    tiny_trainer(tmp_path, max_steps=8, checkpoint_every=2, keep_checkpoints=3).fit(
        tiny_module(), datamodule=TinyData()
    )
    folder = tmp_path / "checkpoints"
    assert names(folder) == [f"step-00000{i}.ckpt" for i in (4, 6, 8)]
    trainer = tiny_trainer(tmp_path, max_steps=8, checkpoint_every=1, keep_checkpoints=3, stop_after=1)
    trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=folder / "step-000004.ckpt")
    assert names(folder) == [f"step-00000{i}.ckpt" for i in (4, 5, 6, 8)]
    assert newest_checkpoint(folder).name == "step-000005.ckpt"
    for i, name in enumerate(names(folder)):  # as after a copy
        os.utime(folder / name, (i, i))
    assert newest_checkpoint(folder).name == "step-000005.ckpt"
    # The next run continues this branch and overwrites the old branch when it reaches its steps.
    trainer = tiny_trainer(tmp_path, max_steps=8, checkpoint_every=1, keep_checkpoints=2)
    trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=newest_checkpoint(folder))
    assert names(folder) == ["step-000007.ckpt", "step-000008.ckpt"]
    assert newest_checkpoint(folder).name == "step-000008.ckpt"


def test_newest_checkpoint_is_chosen_by_step_not_by_clock(tmp_path):
    """If the clock goes backwards during a run, no newer checkpoint is removed."""
    folder = tmp_path / "checkpoints"
    clock = iter(range(100, 0, -1))

    class SetBack(pl.Callback):
        def on_train_batch_start(self, *arguments):
            for name in names(folder) if folder.is_dir() else []:
                if (folder / name).stat().st_mtime > 1000:
                    os.utime(folder / name, (now := next(clock), now))

    options = {"max_steps": 4, "checkpoint_every": 1, "keep_checkpoints": 2, "callbacks": [SetBack()]}
    tiny_trainer(tmp_path, **options).fit(tiny_module(), datamodule=TinyData())
    assert names(folder) == ["step-000003.ckpt", "step-000004.ckpt"]
    assert newest_checkpoint(folder).name == "step-000004.ckpt"


def test_a_checkpoint_of_a_later_step_is_never_removed(tmp_path):
    """Also one that cannot be read, and also by a new run in the same folder."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".step-000100.ckpt.1-ab.tmp").touch()  # from a run that was killed while it wrote
    for step in (100, 200):
        (folder / f"step-{step:06d}.ckpt").touch()
    tiny_trainer(tmp_path, max_steps=2, keep_checkpoints=1).fit(tiny_module(), datamodule=TinyData())
    assert names(folder) == ["step-000002.ckpt", "step-000100.ckpt", "step-000200.ckpt"]
    assert newest_checkpoint(folder).name == "step-000002.ckpt"


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(tmp_path):
    """It goes once enough good ones are newer, or is written again."""
    folder = tmp_path / "checkpoints"
    tiny_trainer(tmp_path, max_steps=9, checkpoint_every=2, stop_after=4).fit(tiny_module(), datamodule=TinyData())
    assert names(folder) == ["step-000002.ckpt", "step-000004.ckpt"]
    (folder / "step-000004.ckpt").write_bytes(b"half of a file")

    def resume(steps, **options):
        trainer = tiny_trainer(tmp_path, max_steps=9, stop_after=steps, **options)
        trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=newest_checkpoint(folder))
        return names(folder)

    assert resume(3) == ["step-000002.ckpt", "step-000004.ckpt", "step-000005.ckpt"]
    assert resume(1) == ["step-000005.ckpt", "step-000006.ckpt"]
    (folder / "step-000006.ckpt").write_bytes(b"half of a file")
    assert resume(2, checkpoint_every=1) == ["step-000006.ckpt", "step-000007.ckpt"]


def test_damaged_checkpoints_are_skipped(tmp_path):
    """Files cut off anywhere, and changed bytes where PyTorch reads; PyTorch raises many types of errors for them."""
    draw, saver = random.Random(0), AtomicCheckpointIO()
    for step in (1, 2):
        values = {"global_step": step, "values": [torch.ones(9), {"a": 1}] * 20}
        saver.save_checkpoint(values, tmp_path / f"step-00000{step}.ckpt")
    whole, path = (tmp_path / "step-000002.ckpt").read_bytes(), tmp_path / "step-000002.ckpt"
    unreadable = 0
    for i in range(200):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[draw.randrange(1000)] = draw.randrange(256)
        path.write_bytes(whole[: draw.randrange(len(whole))] if i % 2 else damaged)
        unreadable += newest_checkpoint(tmp_path).name == "step-000001.ckpt"
    assert unreadable > 100  # changed bytes in names or numbers can go unnoticed


def test_no_readable_checkpoint_is_an_error(tmp_path):
    (tmp_path / "step-000100.ckpt").write_bytes(b"half of a file")
    with pytest.raises(ValueError, match="none of its checkpoints can be read; the last one is step-000100.ckpt"):
        newest_checkpoint(tmp_path)


def full_disk(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Small(io.FileIO):
    """A file on a disk with room for a given number of bytes."""

    room = 100_000

    def write(self, data):
        self.room -= len(data)
        return super().write(data) if self.room >= 0 else full_disk()


def test_system_error_is_not_hidden_by_torch(tmp_path):
    """While closing the archive, torch raises its own error instead."""
    tensors = {str(i): torch.ones(1000) for i in range(100)}
    with pytest.raises(RuntimeError, match="unexpected pos"), Small(tmp_path / "theirs", "w") as file:
        torch.save(tensors, file)
    with pytest.raises(OSError, match="No space left on device"), Small(tmp_path / "ours", "w") as file:
        write_archive(tensors, file)


def test_checkpoint_is_written_after_a_disk_was_full(tmp_path, monkeypatch, capsys):
    """One line is printed, the older checkpoint stays, the next one is written, and the run's numbers do not change."""
    through = tiny_trainer(tmp_path / "through", max_steps=6, checkpoint_every=2)
    through.fit(tiny_module(), datamodule=TinyData())

    class Full(pl.Callback):
        def on_train_batch_start(self, trainer, *arguments):
            if trainer.global_step == 3:
                monkeypatch.setattr("torch.save", full_disk)
            elif trainer.global_step == 5:
                monkeypatch.undo()

    run_dir, capsys_before = tmp_path / "run", capsys.readouterr()
    assert "not written" not in capsys_before.err
    options = {"max_steps": 6, "checkpoint_every": 2, "keep_checkpoints": 1, "callbacks": [Full()]}
    trainer = tiny_trainer(run_dir, **options)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert names(run_dir / "checkpoints") == ["step-000006.ckpt"]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not written" in line]
    path = run_dir / "checkpoints" / "step-000004.ckpt"
    assert line == f"flash-train: {path} not written (No space left on device); the run continues"
    ours, theirs = (torch.load(newest_checkpoint(f / "checkpoints"), weights_only=True)["state_dict"]
                    for f in (run_dir, tmp_path / "through"))  # fmt: skip
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_that_the_full_disk_refused_is_tried_again_at_the_end(tmp_path, monkeypatch):
    class Freed(pl.Callback):
        def on_validation_start(self, *arguments):
            monkeypatch.undo()

    monkeypatch.setattr("torch.save", full_disk)
    tiny_trainer(tmp_path, max_steps=2, callbacks=[Freed()]).fit(tiny_module(), datamodule=TinyData())
    assert names(tmp_path / "checkpoints") == ["step-000002.ckpt"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_removed_is_left(asynchronous, tmp_path, monkeypatch, capsys):
    """The newer one counts as written, and no rank waits for others, which are in no error."""
    barriers = []

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("flash_train.training.callbacks.checkpoint.remove_checkpoint", refuse)
    trainer = tiny_trainer(
        tmp_path, max_steps=6, checkpoint_every=2, keep_checkpoints=1, async_checkpoints=asynchronous
    )
    monkeypatch.setattr(trainer.strategy, "barrier", barriers.append)
    trainer.fit(tiny_module(), datamodule=TinyData())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flash-train: ")]
    folder = tmp_path / "checkpoints"
    assert lines == [
        f"flash-train: {folder}/step-00000{step}.ckpt not removed (Permission denied); the run continues"
        for step in (2, 4)
    ]
    assert names(folder) == [f"step-00000{step}.ckpt" for step in (2, 4, 6)]
    assert barriers.count("Trainer.save_checkpoint") == 3, barriers  # Lightning's own, after each checkpoint


def test_no_checkpoint_found(tmp_path):
    (tmp_path / "step=3.ckpt").touch()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*: expected files named like step-000100.ckpt"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 2.5}, {"keep": 0}])
def test_checkpoint_settings_out_of_range(options, tmp_path):
    with pytest.raises(ValueError, match=r"=(0|2\.5): must be an integer of at least 1, or null"):
        StepCheckpoint(tmp_path, **options)


def test_checkpoint_is_replaced_atomically(tmp_path, monkeypatch):
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
    with pytest.raises(TypeError, match="storage_options={}: must be None"):
        io.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    torch.save({"callable": print}, tmp_path / "unsafe.ckpt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        io.load_checkpoint(tmp_path / "unsafe.ckpt", weights_only=False)


class TwoOptimizers(pl.LightningModule):
    """The first batch takes one optimizer step, every later one takes two."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers()[: 1 if batch_idx == 0 else 2]:
            optimizer.zero_grad()
            self.manual_backward(self.weights[0].sum() + self.weights[1].sum())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=0.1) for weight in self.weights]


def test_multiples_that_a_batch_steps_over_are_saved(tmp_path):
    checkpoints = StepCheckpoint(tmp_path, every=4, keep=None)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        plugins=[AtomicCheckpointIO()], callbacks=[checkpoints],
    )  # fmt: skip
    trainer.fit(TwoOptimizers(), torch.utils.data.DataLoader(range(8)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06}.ckpt" for step in (5, 9, 13, 15)]


class Breaks(torch.utils.data.IterableDataset):
    """Rows; the one with number `good` cannot be read."""

    def __init__(self, good):
        self.good = good

    def __iter__(self):
        for index in range(100):
            if index == self.good:
                raise OSError("this row cannot be read")
            yield packed_row(index)


@pytest.mark.parametrize(("accumulate", "workers"), [(1, 0), (1, 1), (2, 0)])
def test_rows_that_cannot_be_read_leave_a_checkpoint(tmp_path, accumulate, workers):
    """The steps before are not lost. Lightning reads a batch ahead, so the last good row is not trained on."""

    def fit(good, **options):
        trainer = tiny_trainer(tmp_path, max_steps=8, accumulate=accumulate)
        loader = torch.utils.data.DataLoader(Breaks(good), batch_size=None, num_workers=workers)
        trainer.fit(tiny_module(), loader, **options)
        return trainer.global_step

    with pytest.raises(OSError, match="this row cannot be read"):
        fit(6 * accumulate)  # with accumulate=2 within a step
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert path.name == "step-000005.ckpt"
    assert fit(100, ckpt_path=path, weights_only=True) == 8


def test_an_error_within_a_batch_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(CausalLMModule, "on_before_zero_grad", lambda module, _: 1 / (module.global_step < 3))
    with pytest.raises(ZeroDivisionError):
        tiny_trainer(tmp_path, max_steps=8).fit(tiny_module(), datamodule=TinyData())
    assert not (tmp_path / "checkpoints").exists()
