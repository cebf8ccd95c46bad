"""A process ends only when gloo's threads are idle."""

import ctypes
import hashlib
import sys
import threading
import time

import pytest

from flash_train.distributed.leave import wait_for_threads

PR_SET_NAME = 15


@pytest.fixture
def busy_thread():
    """A thread named `worker` that computes for about a second without the interpreter."""
    ended = threading.Event()

    def compute():
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"worker")
        started.set()
        hashlib.sha256(bytes(400 << 20))
        ended.set()

    started = threading.Event()
    thread = threading.Thread(target=compute)
    thread.start()
    started.wait()
    yield ended
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's list of threads")
def test_waits_until_the_thread_is_idle(busy_thread):
    wait_for_threads("worker", seconds=60)
    assert busy_thread.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's list of threads")
def test_waits_neither_for_other_threads_nor_for_ever(busy_thread):
    start = time.monotonic()
    wait_for_threads("other", seconds=60)
    wait_for_threads("worker", seconds=0.05)
    assert not busy_thread.is_set() and time.monotonic() - start < 30
