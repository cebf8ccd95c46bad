"""Paths of the configuration and of runs."""

from pathlib import Path

import pytest

import flash_train
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.paths import (
    conf_dir,
    holds_checkpoint,
    holds_run,
    require_usable,
    run_dir_of,
    unusable,
)


def test_conf_of_the_checkout():
    assert conf_dir() == Path(__file__).resolve().parents[3] / "conf"


def test_conf_of_a_wheel(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "flash_train"
    (package / "conf").mkdir(parents=True)
    (package / "conf" / "train.yaml").touch()
    monkeypatch.setattr(flash_train, "__file__", str(package / "__init__.py"))
    assert conf_dir() == package / "conf"


def test_no_conf(tmp_path, monkeypatch):
    monkeypatch.setattr(flash_train, "__file__", str(tmp_path / "flash_train" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="no configuration"):
        conf_dir()


def test_run_dir_of():
    assert run_dir_of(Path("runs/a/checkpoints/step-000001.ckpt")) == Path("runs/a")
    assert run_dir_of(Path("elsewhere/step-000001.ckpt")) is None


def test_unusable(tmp_path):
    (tmp_path / "file").touch()
    assert unusable(tmp_path) is None
    assert unusable(tmp_path / "new" / "deep") is None
    assert "is a file" in unusable(tmp_path / "file" / "run")
    assert "name too long" in unusable(tmp_path / ("x" * 300) / "run")


def test_a_folder_that_must_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match=r"^run_dir=.*run: .* is not writable; allowed: a folder to write in"):
        require_usable("run_dir", tmp_path / "run")


def test_holds_checkpoint(tmp_path):
    assert not holds_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert not holds_checkpoint(tmp_path) and not holds_run(tmp_path)
    (tmp_path / "checkpoints" / "step-000001.ckpt").touch()
    assert holds_checkpoint(tmp_path) and holds_run(tmp_path)


@pytest.mark.parametrize("name", ["metrics.csv", "summary.json"])
def test_holds_run(tmp_path, name):
    (tmp_path / "log.txt").touch()
    assert not holds_run(tmp_path)
    (tmp_path / name).touch()
    assert holds_run(tmp_path) and not holds_checkpoint(tmp_path)
