"""What a run prints: the progress bar, or lines without a terminal, then the final table and sample."""

import errno
import io
import re
import sys

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console

from flash_train.training import ClosingSample, RichProgress, RunRecord, StopAfter, Throughput
from flash_train.training.callbacks.progress import describe, short
from flash_train.training.callbacks.sample import printable
from tests.support.training.tiny_run import TinyData, tiny_module, tiny_trainer


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None, legacy_windows=False)


def shown(screen: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())


def fit(folder, *callbacks, **options):
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=6, log_every_n_steps=2, logger=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())


def test_bar_in_a_terminal(tmp_path):
    screen = console(terminal=True)
    fit(tmp_path, Throughput(), RichProgress(screen))
    last = [line for line in shown(screen).replace("\r", "\n").splitlines() if line.strip()][-1]
    assert re.search(r"step 6/6 .* loss \d\.\d{4}  \S+ tok/s  peak \d\.\d GiB  0:00:00 left", last), last


def test_lines_without_a_terminal(tmp_path):
    screen = console(terminal=False)
    fit(tmp_path, Throughput(), StopAfter(4), RichProgress(screen), val_check_interval=3, check_val_every_n_epoch=None)
    lines = shown(screen).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/4",
        "validation at step 3: loss " + lines[1].split()[-1],
        "step 4/4",
        "validation at step 4: loss " + lines[3].split()[-1],
    ]


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("terminal", [True, False])
def test_closed_terminal_does_not_stop_training(terminal, tmp_path, monkeypatch):
    """Also a closed pipe, at which rich would end the program."""
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(sys, "stdout", Gone())
    record, progress = RunRecord(tmp_path), RichProgress()
    assert progress.console.is_terminal == terminal
    fit(tmp_path, Throughput(), record, progress, ClosingSample(lambda module: "text"))
    assert record.summary["status"] == "finished"


def test_a_step_is_shown_after_it_is_saved(tmp_path):
    """A terminal that blocks loses no training steps."""
    screen, folder = console(terminal=False), tmp_path / "checkpoints"

    class Shown(pl.Callback):
        def on_train_batch_end(self, *arguments):
            seen.append((len(shown(screen).splitlines()), len(list(folder.glob("*.ckpt")))))

        on_train_batch_start = on_train_batch_end

    seen = []
    trainer = tiny_trainer(tmp_path, max_steps=3, accumulate=1, limit_val_batches=0, progress=True, callbacks=[Shown()],
                           checkpoint_every=1, keep_checkpoints=None)  # fmt: skip
    trainer.progress_bar_callback.console = trainer.progress_bar_callback.lines = screen
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert all(lines <= saved for lines, saved in seen) and (2, 2) in seen
    assert len(shown(screen).splitlines()) == 3


def test_bar_is_stopped_by_a_failure(tmp_path):
    class Fail(pl.Callback):
        def on_train_batch_start(self, *arguments):
            raise OSError("boom")

    progress = RichProgress(console(terminal=True))
    with pytest.raises(OSError, match="boom"):
        fit(tmp_path, Throughput(), progress, Fail())
    assert progress._bar is None


def test_progress_needs_throughput(tmp_path):
    with pytest.raises(ValueError, match="RichProgress needs Throughput"):
        fit(tmp_path, RichProgress())


def test_disabled_bar_shows_nothing(tmp_path):
    screen = console(terminal=True)
    progress = RichProgress(screen)
    progress.disable()
    fit(tmp_path, Throughput(), progress)
    assert shown(screen) == ""


def test_numbers_are_formatted_with_units():
    row = {
        "train/loss": 2.31412,
        "throughput/tokens_per_second": 40667.0,
        "throughput/mfu": 0.519,
        "time/step_seconds": 1.5,
    }
    assert describe(row | {"memory/peak_gib": 32.51}, 40) == (
        "loss 2.3141  40.7k tok/s  MFU 51.9%  peak 32.5 GiB  0:01:00 left"
    )
    assert describe(row | {"throughput/mfu": None}, 0) == "loss 2.3141  40.7k tok/s  0:00:00 left"
    assert [short(x) for x in (7.4, 999, 8069, 123456, 1234567, 123456789, 1.3e9)] == [
        "7", "999", "8.07k", "123k", "1.23M", "123M", "1.3B",
    ]  # fmt: skip


def test_closing_table_and_sample(tmp_path):
    screen = console(terminal=True)
    modes = []

    def generate(module):
        modes.append((module.training, torch.is_autocast_enabled("cpu")))
        return "def f():\n    [bold]return[/bold] 1"

    fit(tmp_path, Throughput(), RunRecord(tmp_path), ClosingSample(generate, screen), precision="bf16-mixed")
    text = shown(screen)
    for expected in ("run finished", "6 of 6", "train loss", "tokens/s", "GiB (process)", "[bold]return[/bold] 1"):
        assert expected in text
    assert "MFU" not in text  # not known here
    assert modes == [(False, True)]


def test_sample_has_no_control_characters():
    assert printable("a\x1b[31mb\x0e\x9b\n\x7f\té") == "a�[31mb��\n�\té"


def test_no_sample_after_an_interruption(tmp_path):
    import os
    import signal

    class Interrupt(pl.Callback):
        def on_train_batch_start(self, trainer, *arguments):
            if trainer.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    calls = []
    trainer = tiny_trainer(tmp_path, max_steps=50, progress=False, callbacks=[Interrupt(), ClosingSample(calls.append)])
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 2
    assert calls == []


def test_closing_table_needs_the_record(tmp_path):
    with pytest.raises(ValueError, match="ClosingSample needs RunRecord before it"):
        fit(tmp_path, Throughput(), ClosingSample(), RunRecord(tmp_path))


def test_without_a_terminal_lines_go_to_standard_output(tmp_path, capsys):
    """A pipe or a file gets the steps together with the rest of the command's output."""
    fit(tmp_path, Throughput(), RichProgress())
    out, err = capsys.readouterr()
    assert "step 2/6" in out and "loss" in out
    assert "step" not in err
