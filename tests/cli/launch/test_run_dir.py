"""A run directory belongs to one run at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_train.cli.config.environment import is_first_process
from flash_train.cli.config.errors import UsageError
from flash_train.cli.launch import run_dir as lock_module
from flash_train.cli.launch.interrupt import resumable
from flash_train.cli.launch.run_dir import LOCK, locked, new_folder
from tests.support.processes import python_path

ROOT = Path(__file__).parents[3]
HOLDS = """
import sys
from pathlib import Path
from flash_train.cli.launch.run_dir import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has locked `tmp_path / "run"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path / "run"],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("enter", [locked, resumable], ids=["a run", "a sweep or a search"])
def test_second_run_in_a_folder_is_refused(enter, other, tmp_path):
    with pytest.raises(UsageError) as caught, enter(tmp_path / "run"):
        pass
    assert str(caught.value).startswith(
        f"run_dir={tmp_path / 'run'}: another run is writing there (process {other.pid}"
    )
    assert "allowed: another folder, or this one once that run has ended" in str(caught.value)
    assert (tmp_path / "run" / LOCK).is_file()
    with locked(tmp_path / "another"):
        pass


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_folder_is_free_after_the_first_run(end, other, tmp_path):
    if end == "kill":
        other.kill()
    other.communicate()
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_forked_process_keeps_no_lock(tmp_path):
    """Workers live on for seconds after a run that was killed."""
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        with locked(tmp_path):
            if os.fork() == 0:  # a worker
                os.read(read, 1)
                os._exit(0)
            os._exit(0)  # killed: nothing is cleaned up
    os.waitpid(first, 0)
    with locked(tmp_path):
        pass
    os.write(write, b"x")
    os.close(read)
    os.close(write)


def test_file_system_without_locks_prints_a_line(tmp_path, monkeypatch, capsys):
    def lockf(file, flags):
        raise OSError(lock_module.fcntl.__dict__.get("ENOLCK", 37), "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "lockf", lockf)
    with locked(tmp_path):
        assert list(tmp_path.iterdir()) == []
    assert "this file system has no locks" in capsys.readouterr().err


def test_new_folder_gets_a_free_name(tmp_path):
    wanted = tmp_path / "runs" / "2026-01-02_03-04-05"
    assert [new_folder(wanted).name for _ in range(3)] == [f"{wanted.name}{end}" for end in ("", "_2", "_3")]


def test_a_folder_that_cannot_be_created(tmp_path):
    """A link to a folder that is missing has the name of the folder, so no other name is tried."""
    (tmp_path / "runs").symlink_to(tmp_path / "missing")
    for create in (new_folder, lambda path: locked(path).__enter__()):
        with pytest.raises(UsageError, match=r"^run_dir=.*runs: cannot be created \(File exists\); allowed: a folder"):
            create(tmp_path / "runs" / "a" if create is new_folder else tmp_path / "runs")


def test_further_ranks_lock_nothing(tmp_path, other, monkeypatch):
    assert is_first_process({}) and is_first_process({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "0"})
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        assert not is_first_process({name: "1"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    with locked(tmp_path / "run"):  # the first rank has it
        pass
