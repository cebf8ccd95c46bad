"""Runs that end early: by a signal, before the first row, in the last validation, on a full disk."""

import errno
import os
import re
import signal
import time

import pytest

from tests.support.cli.runs import losses_of, start, summary_of


def test_sigterm_saves_and_exits_with_143(tiny, tmp_path):
    process = start(*tiny, "max_steps=1000000", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['steps']:06}.ckpt").is_file()
    assert "resume=last" in out


@pytest.mark.slow
def test_stop_before_the_first_logged_row_logs_its_last_step(in_process, tiny, tmp_path):
    out = in_process(*tiny, "max_steps=30", "stop_after=3", "log_every=10")
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["val_loss"] > 0 and summary["tokens_per_second"] > 0
    assert "loss.png, throughput.png, memory.png, checkpoints/step-000003.ckpt" in out
    in_process(*tiny, "max_steps=30", "stop_after=8", "log_every=10", "resume=last")
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"loss.png", "throughput.png", "memory.png"}


@pytest.mark.slow
def test_a_run_that_was_killed_in_its_last_validation_is_completed(in_process, tiny, tmp_path, monkeypatch):
    """The record is the same as after an unbroken run."""
    in_process(*tiny, f"run_dir={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        patch.setattr("flash_train.training.CausalLMModule.validation_step", killed)
        with pytest.raises(SystemExit):
            in_process(*tiny)
    assert summary_of(tmp_path / "run")["status"] == "interrupted"
    out = in_process(*tiny, "resume=last")
    assert "run: all 3 steps are done; validation and record are completed" in out and "sample" in out
    assert re.search(rf"to continue: .+ run_dir={tmp_path / 'run'} resume=last max_steps=6\n", out)
    whole, closed = (summary_of(tmp_path / name) for name in ("whole", "run"))
    for name in ("status", "steps", "seq_len", "train_loss", "val_loss", "bits_per_byte"):
        assert closed[name] == whole[name] is not None, name
    with pytest.raises(SystemExit):  # once
        in_process(*tiny, "resume=last")


def killed(*arguments, **named):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_after_ctrl_c_in_the_last_validation_the_advice_works(tiny, tmp_path, in_process, monkeypatch, capsys):
    def press(module, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("flash_train.training.CausalLMModule.validation_step", press)
        with pytest.raises(SystemExit) as stop:
            in_process(*tiny)
    assert stop.value.code == 128 + signal.SIGINT
    assert re.search(rf"to continue: .+ run_dir={tmp_path / 'run'} resume=last\n", capsys.readouterr().out)
    in_process(*tiny, "resume=last")
    assert summary_of(tmp_path / "run")["status"] == "finished"


def test_a_full_disk_at_the_last_checkpoint_exits_with_1(in_process, tiny, tmp_path, monkeypatch, capsys):
    def full(checkpoint, file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(SystemExit) as stop:
        in_process(*tiny)
    assert stop.value.code == 1
    path = tmp_path / "run" / "checkpoints" / "step-000003.ckpt"
    lines = [line for line in capsys.readouterr().err.splitlines() if str(path) in line]
    assert lines[-1] == f"flash-train: {path} not written (No space left on device)"
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert list(losses_of(tmp_path / "run")) == ["1", "2", "3"] and not list(path.parent.iterdir())
