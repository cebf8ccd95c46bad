"""Modules that run in processes of their own, without the seconds that importing PyTorch and Lightning takes.

A server imports the libraries once; every process is a fork of it. A process has its own environment, folder and
standard streams, and runs the module as `python -W ignore -m MODULE` does. It also runs what `atexit` was given.

Start Python itself where a test is about how a command starts: its imports, its launcher, an installed script.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "lightning.pytorch",
    "flash_train.cli.run.command",
    "flash_train.cli.run.build",
    "flash_train.training",
    "flash_train.distributed.strategy",
)


def python_path(folder: Path = ROOT) -> str:
    """Return PYTHONPATH for a new process: this checkout, or another, before what it has here."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(list(IMPORTED))


class Descriptor:
    """An open file that a new process receives; there, it is a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _received, (DupFd(self.number),)


def _received(descriptor: Any) -> int:
    return descriptor.detach()


class Process:
    """A running process, with the methods of `subprocess.Popen` that tests use.

    It shares its standard streams with the processes that it starts; `communicate` waits for all of these.
    """

    def __init__(
        self, module: str, *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> None:
        self.args = [module, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": python_path(), **(environment or {})}
        pipes = os.pipe(), os.pipe()
        streams = [Descriptor(written) for _, written in pipes]
        self._process: BaseProcess = _server.Process(target=_run, args=(self.args, str(cwd), environment, *streams))
        self._process.start()
        for _, written in pipes:
            os.close(written)
        self._read: list[bytes] = [b"", b""]
        self._readers = [
            threading.Thread(target=self._collect, args=(i, read), daemon=True) for i, (read, _) in enumerate(pipes)
        ]
        for reader in self._readers:
            reader.start()

    def _collect(self, index: int, pipe: int) -> None:
        with open(pipe, "rb") as stream:
            self._read[index] = stream.read()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait until every process that has the streams has ended: standard output and standard error."""
        for reader in self._readers:
            reader.join(timeout)
        self._process.join(timeout)
        if self.returncode is None or any(reader.is_alive() for reader in self._readers):
            raise subprocess.TimeoutExpired(self.args, timeout)
        out, err = (text.decode() for text in self._read)
        return out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _run(arguments: list[str], cwd: str, environment: dict[str, str], out: int, err: int) -> None:
    """Become `python -W ignore -m MODULE ARGUMENT...`."""
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[attr-defined]  # whatever it was before
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = _get_rank() or 0  # Lightning read the server's variables
    os.chdir(cwd)
    sys.path[:0] = [cwd]
    warnings.simplefilter("ignore")
    multiprocessing.process.current_process()._inheriting = False  # type: ignore[attr-defined]
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()


def run(module: str, *arguments: object, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a module to its end."""
    process = Process(module, *arguments, **options)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_python(module: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a module to its end in a new interpreter, for modules that spawn processes themselves."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_ranks(
    module: str, ranks: int, *arguments: object, environment: Mapping[str, str] | None = None
) -> list[Process]:
    """Start a module on several ranks, each with the variables that torchrun sets."""
    shared = {
        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [
        Process(module, *arguments, environment={**shared, **(environment or {}), **variables}) for variables in own
    ]


def run_ranks(module: str, ranks: int, *arguments: object, timeout: float = 300) -> str:
    """Run a module on several ranks, which must all succeed: the first one's standard output."""
    processes = start_ranks(module, ranks, *arguments)
    try:
        ended = [process.communicate(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, (codes, *(err[-3000:] for _, err in ended))
    return ended[0][0]
