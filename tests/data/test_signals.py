"""Signals to a run also reach its workers: they ignore them, and only the main process ends them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from flash_train.data.loading import BatchStream
from flash_train.data.order.sampler import EndlessBatchSampler, EndlessOrder
from flash_train.data.recall import RecallCorpus, RecallRows
from flash_train.data.signals import STOPPING, leave_signals_to_main
from tests.support.processes import python_path

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="workers know the sender on Linux only")

ROOT = Path(__file__).parents[2]


def children() -> list[int]:
    """The running child processes."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(status.parent.name))
    return found


def has_pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal is pending for the process. Until it is delivered, a second one would be lost."""
    pending = Path(f"/proc/{pid}/status").read_text().split("ShdPnd:")[1].split()[0]
    return bool(int(pending, 16) >> (number - 1) & 1)


@pytest.fixture
def batches():
    corpus = RecallCorpus(n_pairs=4, n_keys=8, n_values=8)
    rows = RecallRows(corpus, 64, 0, "train")
    order = EndlessOrder(len(rows), seed=0, shuffle=False)
    stream = BatchStream(rows, lambda: EndlessBatchSampler(order, 2), num_workers=2)
    before = set(children())
    iterator = iter(stream)
    next(iterator)
    workers = [pid for pid in children() if pid not in before]
    assert len(workers) == 2
    yield iterator, workers
    iterator.close()


@pytest.mark.parametrize("number", STOPPING, ids=lambda number: number.name)
def test_a_signal_that_workers_receive_ends_no_worker(batches, number, monkeypatch):
    """Sent by another process, as terminals, schedulers and service managers do."""
    iterator, workers = batches
    for _ in range(3):
        subprocess.run(["kill", f"-{number.name}", *map(str, workers)], check=True)
        for _ in range(4):
            next(iterator)
    assert set(workers) <= set(children())


def test_a_sigterm_of_the_main_process_ends_a_worker(batches):
    """PyTorch ends workers this way if they do not end by themselves, and waits for them at the interpreter's exit."""
    _, workers = batches
    os.kill(workers[0], signal.SIGTERM)
    deadline = time.monotonic() + 120
    while workers[0] in children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert workers[1] in children()


def test_main_process_receives_signals_afterwards(batches):
    """Also a signal that arrived while workers were being started."""
    assert not set(STOPPING) & signal.pthread_sigmask(signal.SIG_BLOCK, [])


EXITS = """
import os, signal, sys
from flash_train.data import PackedDataModule, RecallCorpus
data = PackedDataModule(RecallCorpus(n_pairs=4, n_keys=8, n_values=8), seq_len=64, batch_size=2, num_workers=2)
batches = iter(data.train_dataloader())
next(batches)
print("ready", flush=True)
if sys.argv[1] == "error":
    sys.modules["keep"] = batches  # alive until the interpreter's very end
    raise ValueError("an error")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["error", "kill"])
def test_no_worker_outlives_the_main_process(end):
    """The interpreter would wait forever for a worker that ignores every SIGTERM, which keeps the output open."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXITS, end],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.communicate(timeout=120)  # returns once no process has the output open
    assert process.returncode == (1 if end == "error" else -signal.SIGKILL)


KILLED_WHILE_WORKERS_START = """
import os, signal, sys, time
from torch.utils.data import DataLoader, IterableDataset
from flash_train.data.signals import leave_signals_to_main

class SlowToStart(IterableDataset):
    def __iter__(self):
        os.write(started, b".")
        time.sleep(5)
        return iter(range(10))

if __name__ == "__main__":
    end, started = os.pipe()
    options = {"multiprocessing_context": "fork", "worker_init_fn": leave_signals_to_main}
    batches = iter(DataLoader(SlowToStart(), num_workers=2, batch_size=None, **options))
    os.read(end, 1), os.read(end, 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_worker_that_is_still_starting_ends_with_the_main_process():
    """PyTorch's workers begin to watch the main process only once they have started."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_WORKERS_START],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


LATER_PROCESS = """
import multiprocessing, signal, sys
from flash_train.data import PackedDataModule, RecallCorpus

def blocked():
    sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    data = PackedDataModule(RecallCorpus(n_pairs=4, n_keys=8, n_values=8), seq_len=64, batch_size=2, num_workers=1)
    next(iter(data.train_dataloader()))
    later = multiprocessing.Process(target=blocked)
    later.start()
    later.join()
    sys.exit(later.exitcode)
"""


@pytest.mark.slow
def test_later_processes_of_a_fork_server_get_all_signals(tmp_path):
    """They inherit what the server blocks, which the first loader starts."""
    program = tmp_path / "program.py"
    program.write_text(LATER_PROCESS)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    assert subprocess.run([sys.executable, program], env=environment, timeout=120).returncode == 0


class Pids(Dataset):
    def __getitem__(self, index: int) -> int:
        return os.getpid()

    def __len__(self) -> int:
        return 100


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_main_process_ends_workers_however_they_are_started(method):
    """Workers of a fork server, Python's default from 3.14 on, are its children, not the main process's."""
    loader = DataLoader(
        Pids(), num_workers=1, multiprocessing_context=method, worker_init_fn=leave_signals_to_main, batch_size=None
    )
    iterator = iter(loader)
    worker = int(next(iterator))
    subprocess.run(["kill", "-TERM", str(worker)], check=True)  # another process's: ignored
    assert int(next(iterator)) == worker
    deadline = time.monotonic() + 120
    while has_pending(worker, signal.SIGTERM):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker, signal.SIGTERM)
    while iterator._workers[0].is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert iterator._workers[0].exitcode == 0
