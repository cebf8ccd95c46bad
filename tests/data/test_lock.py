import errno
import multiprocessing
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from flash_train.data import lock
from flash_train.data.lock import exclusive

fcntl = pytest.importorskip("fcntl")
FLOCK = fcntl.flock


@contextmanager
def asked_for(path: Path):
    """A function that returns whether a process that opened `path` at the beginning of the block could lock it now."""
    with open(path, "ab") as file:

        def is_free() -> bool:
            try:
                FLOCK(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        yield is_free


def first_time(monkeypatch, act) -> None:
    """Calls `act` before the first lock is requested."""
    actions = [act]

    def flock(file, operation) -> None:
        if actions:
            actions.pop()()
        FLOCK(file, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock)


def raises(number: int):
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def test_lock_is_held_inside_and_its_file_is_removed(tmp_path):
    path = tmp_path / "lock"
    with exclusive(path, "waiting") as is_alone, asked_for(path) as is_free:
        assert is_alone and not is_free()
    assert list(tmp_path.iterdir()) == []


def test_lock_is_released_after_an_error(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(KeyError), exclusive(path, "waiting"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_forked_processes_do_not_keep_the_lock(tmp_path):
    path, context = tmp_path / "lock", multiprocessing.get_context("fork")
    done = context.Event()
    with ExitStack() as waiting:
        with exclusive(path, "waiting"):
            forked = context.Process(target=done.wait, args=(60,), daemon=True)
            forked.start()
            is_free = waiting.enter_context(asked_for(path))
        assert is_free()
    done.set()
    forked.join()


def test_a_file_unlinked_by_its_last_holder_is_not_the_lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    first_time(monkeypatch, path.unlink)
    with exclusive(path, "waiting"), asked_for(path) as is_free:
        assert not is_free()


def test_a_file_that_a_file_server_has_lost_is_not_the_lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    first_time(monkeypatch, raises(errno.ESTALE))
    with exclusive(path, "waiting") as is_alone, asked_for(path) as is_free:
        assert is_alone and not is_free()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_missing_file_locks_are_reported_to_the_caller(tmp_path, monkeypatch, number):
    first_time(monkeypatch, raises(number))
    with exclusive(tmp_path / "lock", "waiting") as is_alone:
        assert not is_alone and list(tmp_path.iterdir()) == []


def test_other_errors_are_raised(tmp_path, monkeypatch):
    first_time(monkeypatch, raises(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), exclusive(tmp_path / "lock", "waiting"):
        pass
