"""Resuming: the same digits as an unbroken run, and which checkpoint and settings are taken."""

import csv
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.cli.runs import losses_of, summary_of


def test_resume_is_exact_and_stays_in_its_directory(in_process, tiny, tmp_path):
    tiny = [*tiny, "max_steps=4", "attention.dropout=0.1", "model.residual_dropout=0.1", "accumulate=2"]
    in_process(*tiny, f"run_dir={tmp_path / 'whole'}")
    in_process(*tiny, f"run_dir={tmp_path / 'parts'}", "stop_after=1")
    assert summary_of(tmp_path / "parts")["steps"] == 1
    in_process(*tiny, f"run_dir={tmp_path / 'parts'}", "stop_after=1", "resume=last")
    without = [text for text in tiny if not text.startswith("run_dir")]
    in_process(*without, f"resume={tmp_path / 'parts' / 'checkpoints' / 'step-000002.ckpt'}")
    assert summary_of(tmp_path / "parts")["steps"] == 4
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert len(losses_of(tmp_path / "whole")) == 4


@pytest.mark.slow
def test_another_schedule_is_reported(in_process, tiny, tmp_path):
    def rates_of(folder: str) -> list[str]:
        with open(tmp_path / folder / "metrics.csv", encoding="utf-8", newline="") as file:
            return [row["train/learning_rate"] for row in csv.DictReader(file) if row["train/learning_rate"]]

    in_process(*tiny, "max_steps=8", f"run_dir={tmp_path / 'long'}")
    in_process(*tiny, "max_steps=4", "stop_after=2")
    assert "schedule:" not in in_process(*tiny, "max_steps=4", "stop_after=1", "resume=last")
    out = in_process(*tiny, "max_steps=8", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("schedule: ")]
    rates, long = rates_of("run"), rates_of("long")
    assert line.startswith("schedule: max_steps=8 changes it, as the run was planned for 4: ")
    assert line.endswith(f" to {float(rates[3]):.3g}")
    assert rates[3:] == long[3:] and rates[:3] != long[:3]  # from the first resumed step on


@pytest.mark.slow
def test_changed_settings_are_reported(in_process, tiny, tmp_path):
    in_process(*tiny, "max_steps=6", "stop_after=1")
    assert "resumed:" not in in_process(*tiny, "max_steps=6", "stop_after=1", "resume=last")
    others = ["batch_size=1", "accumulate=3", "optimizer.gradient_clip=null", "attention.dropout=0.1"]
    out = in_process(*tiny, *others, "max_steps=6", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("resumed: ")]
    assert line == (
        "resumed: rows in a step was 2 and is 3, batch_size was 2 and is 1, attention.dropout was 0.0 and is 0.1, "
        "optimizer.gradient_clip was 1.0 and is null"
    )


def test_a_finished_run_is_not_resumed(in_process, flash_train, tiny, tmp_path):
    in_process(*tiny)
    code, lines = flash_train(f"run_dir={tmp_path / 'run'}", "resume=last")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003.ckpt"
    assert code == 1 and lines == [
        f"flash-train: resume={checkpoint}: is at step 3 and max_steps=3; allowed: max_steps above that "
        "(see docs/resume.md)"
    ]


def change_checkpoint(path: Path, **entries) -> None:
    torch.save({**torch.load(path, weights_only=True), **entries}, path)


@pytest.mark.slow
def test_a_later_checkpoint_of_an_earlier_branch_is_reported_and_not_taken(in_process, tiny, tmp_path):
    in_process(*tiny, "max_steps=6", "stop_after=2", "trainer.checkpoint_every=1")
    change_checkpoint(tmp_path / "run" / "checkpoints" / "step-000001.ckpt", branch=1)
    out = in_process(*tiny, "max_steps=6", "stop_after=1", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("checkpoint: ")]
    assert line == (
        "checkpoint: step-000001.ckpt was written last and is taken; "
        "step-000002.ckpt is from an earlier branch, and stays"
    )


@pytest.mark.slow
def test_resume_last_ignores_the_times_of_files(in_process, tiny, tmp_path):
    """Copying a folder changes the times of its files and their order."""
    in_process(*tiny, "max_steps=6", "stop_after=2", "trainer.checkpoint_every=1")
    before = losses_of(tmp_path / "run")
    os.utime(tmp_path / "run" / "checkpoints" / "step-000002.ckpt", (1, 1))
    out = in_process(*tiny, "max_steps=6", "stop_after=1", "resume=last")
    assert "checkpoint: " not in out
    assert list(losses_of(tmp_path / "run")) == ["1", "2", "3"]
    assert before.items() <= losses_of(tmp_path / "run").items()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"half of a file"])
def test_a_damaged_checkpoint_is_passed_over(in_process, tiny, tmp_path, damage):
    in_process(*tiny, "max_steps=4", f"run_dir={tmp_path / 'whole'}")
    in_process(*tiny, "max_steps=4", "stop_after=3", "trainer.checkpoint_every=2")
    (tmp_path / "run" / "checkpoints" / "step-000003.ckpt").write_bytes(damage)
    out = in_process(*tiny, "max_steps=4", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("checkpoint: ")]
    assert line == ("checkpoint: step-000003.ckpt cannot be read; step-000002.ckpt, the newest complete one, is taken")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_named_checkpoint_is_taken_without_a_message(in_process, tiny, tmp_path):
    """Its name may be any, and other checkpoints in its folder don't matter."""
    in_process(*tiny, "max_steps=6", "stop_after=2", "trainer.checkpoint_every=1")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copy(folder / "step-000001.ckpt", folder / "kept.ckpt")
    for name in ("step-000001", "kept"):
        run_dir, resume = f"run_dir={tmp_path / name}", f"resume={folder / name}.ckpt"
        assert "checkpoint: " not in in_process(*tiny, run_dir, resume, "max_steps=6", "stop_after=1")
        assert summary_of(tmp_path / name)["steps"] == 2


@pytest.mark.slow
def test_offline_parts_at_wandb_have_different_ids(in_process, tiny, tmp_path):
    in_process(*tiny, "logger=wandb", "stop_after=1")
    in_process(*tiny, "logger=wandb", "resume=last")
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    ids = (tmp_path / "run" / "wandb" / "run_id").read_text().split()
    assert len(folders) == 2 and {folder.name.split("-")[3] for folder in folders} == set(ids)
