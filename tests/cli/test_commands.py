"""Each command starts as a module and by its console script, and prints its version."""

import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flash_train
from flash_train import cli
from flash_train.cli.config.errors import one_line_errors
from flash_train.cli.config.overrides import read
from tests.support.processes import python_path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in Path(cli.__file__).parent.glob("*.py"))
COMMANDS = [name for name in MODULES if "\ndef main(" in (ROOT / "flash_train" / "cli" / f"{name}.py").read_text()]


def run(*arguments: str) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300)


def test_there_are_commands():
    assert {"train", "ablate", "export", "profile_memory"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_module_with_a_main_runs_it(name):
    source = inspect.getsource(importlib.import_module(f"flash_train.cli.{name}"))
    assert 'if __name__ == "__main__":' in source


@pytest.mark.parametrize("name", ["train", "ablate", "export", "profile_memory"])
def test_python_m_runs_a_command(name):
    done = run("-m", f"flash_train.cli.{name}", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"flash-train {flash_train.__version__}\n", "")


def test_python_m_ends_with_the_status_of_a_mistake():
    done = run("-m", "flash_train.cli.export", "nowhere", "folder")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("flash-train: checkpoint=nowhere: no such file or folder")


def test_a_wheel_has_a_command_for_each_thing_a_user_does():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(scripts) == {"flash-train", "flash-train-memory", "flash-train-ablate", "flash-train-export"}
    for place in scripts.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_version_prints_the_packages_version(capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors():
        read(["--version"])
    assert not stop.value.code and capsys.readouterr().out == f"flash-train {flash_train.__version__}\n"
