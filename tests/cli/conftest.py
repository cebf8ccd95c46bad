"""A corpus small enough to train on in seconds, and overrides for a short run."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from flash_train.cli import train
from tests.support.cli.runs import TINY_MODEL


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty documents of uneven length."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox " * (i + 1), encoding="utf-8")
    return folder


@pytest.fixture
def tiny(tmp_path: Path, corpus: Path) -> list[str]:
    """Overrides of a run that takes a second and writes under `tmp_path` only."""
    return [
        *("data=text", f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}", "data.val_batches=1"),
        *("seq_len=64", "batch_size=2", "max_steps=3", "hardware=cpu", "logger=none", f"run_dir={tmp_path / 'run'}"),
        *TINY_MODEL,
    ]


@pytest.fixture
def in_this_process(monkeypatch, capsys):
    """Turns a console script's `main` into a function: its arguments → (exit code, lines on stderr)."""

    def command(main: Callable[[], None]) -> Callable[..., tuple[int, list[str]]]:
        def run(*arguments: str) -> tuple[int, list[str]]:
            monkeypatch.setattr(sys, "argv", ["command", *arguments])
            code = 0
            try:
                main()
            except SystemExit as stop:
                code = stop.code
            finally:
                GlobalHydra.instance().clear()
            return code, capsys.readouterr().err.splitlines()

        return run

    return command


@pytest.fixture
def flash_train(in_this_process) -> Callable[..., tuple[int, list[str]]]:
    """`flash-train` in this process: its arguments → (exit code, lines on stderr)."""
    return in_this_process(train.main)


@pytest.fixture
def in_process(monkeypatch, capsys) -> Callable[..., str]:
    """`flash-train` in this process: its arguments → standard output. A mistake raises SystemExit."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["flash-train", *arguments])
        try:
            train.main()
        finally:
            GlobalHydra.instance().clear()
        return capsys.readouterr().out

    return call
