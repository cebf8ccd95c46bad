"""Starts the other ranks of a machine as Lightning does, and ends all if one fails before they watch each other."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from flash_train.distributed.watch import POLL, exit_now
from flash_train.output import LOGGER

PARENT = "FLASH_TRAIN_PARENT"  # an environment variable of a started rank: the process that started it


def end_with_parent(is_watched: Callable[[], bool]) -> None:
    """End this process if its parent, a `WatchedLauncher`, ends before the ranks watch each other."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return

    def observe() -> None:
        while not is_watched():
            if os.getppid() != int(parent):
                exit_now(1)
            time.sleep(POLL)

    threading.Thread(target=observe, name="launcher", daemon=True).start()


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher with another observer: Lightning's kills this process without a message if a child fails.

    Args:
        is_watched: whether the ranks watch each other; from then on this launcher does not.
    """

    def __init__(self, *arguments: Any, is_watched: Callable[[], bool]) -> None:
        super().__init__(*arguments)
        self.is_watched = is_watched

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT]
            threading.Thread(target=self._observe, name="launcher", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _observe(self) -> None:
        first_rank = self.cluster_environment.node_rank() * self.num_processes
        while not self.is_watched():
            for rank, child in enumerate(self.procs, start=first_rank + 1):
                if status := child.poll():
                    LOGGER.error("rank %s ended with status %s before the ranks were connected", rank, status)
                    self.kill_children()
                    exit_now(status if status > 0 else 1)
            time.sleep(POLL)

    def kill_children(self) -> None:
        self.kill(getattr(signal, "SIGKILL", signal.SIGTERM))
