"""Ends all ranks of a run when one of them fails, dies or hangs.

NCCL cannot do this: its collectives wait for a dead rank until their timeout, and do not name it. So every rank holds a
TCP connection to the first rank. The system closes the connection when a process ends, whatever ended it. A thread of
each rank waits for this.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flash_train.distributed.peers import CONNECT, Message, accept, connect, name_ranks
from flash_train.output import LOGGER

POLL = 1.0  # seconds between two looks at the number of collectives
CAUSE_DELAY = 1.0  # seconds to wait after an exception: if another rank's failure caused it, that becomes known
REPORT_TIMEOUT = 10.0  # seconds that a rank has to print its message and write its record
# The other ranks end this many seconds later, so that torchrun sees the failed rank end first and names it
EXIT_DELAY = 0.3 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0


def ranks_behind(counts: Sequence[int]) -> list[int]:
    """Return the ranks that have begun fewer collectives than another one."""
    return [rank for rank, count in enumerate(counts) if count < max(counts)]


def collectives_begun() -> int:
    """Return the number of collectives that this rank has begun, over all its groups; it is safe in any thread."""
    groups: list[Any] = [
        group for group in list(distributed_c10d._world.pg_map) if isinstance(group, dist.ProcessGroup)
    ]
    return sum(group._get_sequence_number_for_group() for group in groups)


class RankWatch:
    """One rank's part of the watch. All ranks create it together, in an initialised process group.

    When a rank fails, the others end with `os._exit`, as their main threads may be in a collective that never ends.

    - A rank with an exception calls `report_failure`. It then reports the exception itself, and the others wait for its
      end.
    - If a rank dies without calling `report_failure`, the first rank prints a line. If the first one dies, the ranks
      with `reports_first_rank` print it.
    - If no rank begins a collective for `timeout` seconds, the ranks that have begun fewer than others are missing at a
      collective. They print their stacks.

    Args:
        rank: of this process.
        ranks: how many there are.
        address: a host name or an IP address of a machine that all ranks reach, such as MASTER_ADDR.
        timeout: seconds; None waits without limit.
        reports_first_rank: whether this rank reports the death of the first one.
        exit_status: the status with which all ranks exit after an exception.

    Attributes:
        before_exit: called with the reason before the process ends because of another rank; must be quick.

    Raises:
        OSError: the ranks cannot connect.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        address: str,
        timeout: float | None,
        *,
        reports_first_rank: bool,
        exit_status: Callable[[BaseException], int],
    ) -> None:
        self.rank, self.timeout, self.exit_status = rank, timeout, exit_status
        self.reports_first_rank = reports_first_rank
        self.before_exit: list[Callable[[str], object]] = []
        self._decision = threading.Lock()  # held by the thread that ends the watch
        self._is_over = False
        self._may_report = threading.Event()
        self._own_status: int | None = None
        self._peers = accept(ranks, address) if rank == 0 else connect(rank)
        atexit.register(self._at_exit)
        if hasattr(os, "register_at_fork"):  # a forked worker would keep the connections open
            os.register_at_fork(after_in_child=self._close)
        self._counts, self._changed_at = [0] * ranks, time.monotonic()
        self._left: set[int] = set()
        self._all_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def report_failure(self, error: BaseException, *, on_all_ranks: bool = False) -> None:
        """Tell the first rank about this rank's exception.

        Returns if this rank is to report it, or if the first rank does not answer. Otherwise the process ends here.

        Args:
            on_all_ranks: every rank has this exception, and the first one reports it.
        """
        if self._is_over:
            return
        if not on_all_ranks:
            time.sleep(CAUSE_DELAY)  # an error of a collective follows the failure of another rank
        text, status = f"{type(error).__name__}: {error}", self.exit_status(error)
        self._own_status = status
        if self.rank > 0:
            if not on_all_ranks:
                self._send([0], failed=text, status=status)
            self._may_report.wait(2 * REPORT_TIMEOUT)
        elif self._decision.acquire(blocking=False):
            self._is_over = True
            self._send(self._peers, failed_rank=0, status=status)
        else:
            time.sleep(2 * REPORT_TIMEOUT)  # the other thread ends this process
            raise error

    def leave(self) -> None:
        """End the watch; all ranks call it when they need each other no longer. After a failure it does nothing."""
        if self._is_over:
            return
        if self.rank > 0:
            self._is_over = True
            self._send([0], left=True)
        else:
            self._all_left.wait(CONNECT)
            if not self._decision.acquire(blocking=False):
                time.sleep(2 * REPORT_TIMEOUT)  # the other thread ends this process
            self._is_over = True
            self._send(self._peers, left=True)
        atexit.unregister(self._at_exit)
        self._stop()

    def _at_exit(self) -> None:
        """Do not leave the process groups after a failure: the others may never answer."""
        if self._own_status is not None:
            exit_now(self._own_status)
        self._is_over = True
        self._stop()

    def _stop(self) -> None:
        """Wait for the thread's end: Python cannot end one that is inside PyTorch, and aborts."""
        for peer in self._peers.values():
            with suppress(OSError):  # the other end has closed the connection
                peer.connection.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join()
        self._close()

    # -- the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, rank)
                for message in peer.left_over():  # a rank has begun to work while others were still connecting
                    self._handle(rank, message)
            while not self._is_over and selector.get_map():  # without connections nothing is left to watch
                for key, _ in selector.select(POLL):
                    rank = key.data
                    for message in self._peers[rank].receive():
                        self._handle(rank, message)
                    if self._peers[rank].has_ended:
                        selector.unregister(key.fileobj)
                        if rank not in self._left and not self._is_over:
                            self._end_after_death(rank)
                self._check_progress()

    def _handle(self, rank: int, message: Message) -> None:
        match message:
            case {"begun": int(count)}:
                self._counts[rank] = count
                self._changed_at = time.monotonic()
            case {"left": True}:
                self._left.add(rank)
                if len(self._left) == len(self._peers):
                    self._all_left.set()
                self._is_over = self.rank > 0
            case {"failed": str(text), "status": int(status)}:  # to the first rank
                if self._decision.acquire(blocking=False):
                    self._send([rank], failed_rank=rank, status=status)
                    _discard_output()
                    self._wait_for_end([rank], REPORT_TIMEOUT)
                    self._end_all(f"rank {rank}: {text}", status, failed_rank=rank)
            case {"failed_rank": int(failed), "status": int(status)}:  # from the first rank
                if failed == self.rank:
                    self._may_report.set()
                    self._is_over = True
                    return
                _discard_output()
                if failed == 0:
                    self._wait_for_end([0], REPORT_TIMEOUT)
                time.sleep(EXIT_DELAY)
                exit_now(status)
            case {"behind": list(ranks)}:
                self._exit_behind(ranks)

    def _end_after_death(self, rank: int) -> None:
        text = (
            f"rank {rank} has died: its process ended without an error of its own, as after kill -9 or without memory"
        )
        if self._decision.acquire(blocking=False):
            if self.rank == 0 or self.reports_first_rank:
                LOGGER.error("%s; all ranks end", text)
            _discard_output()
            self._end_all(text, 1, failed_rank=rank)

    def _check_progress(self) -> None:
        begun = collectives_begun() if dist.is_initialized() else 0
        if begun != self._counts[self.rank]:
            self._handle(self.rank, {"begun": begun})
            if self.rank > 0:
                self._send([0], begun=begun)
        if self.rank > 0 or self.timeout is None or time.monotonic() - self._changed_at < self.timeout:
            return
        if (behind := ranks_behind(self._counts)) and self._decision.acquire(blocking=False):
            text = f"{name_ranks(behind)} did not arrive at a collective within the timeout of {self.timeout:g} s"
            LOGGER.error("%s; all ranks end", text)
            self._send(self._peers, behind=behind)
            self._wait_for_end(behind, REPORT_TIMEOUT)
            try:
                self._before_exit(text)
            finally:
                self._exit_behind(behind)

    def _end_all(self, text: str, status: int, **message: Any) -> NoReturn:
        self._send(self._peers, **message, status=status)
        try:
            self._before_exit(text)
            time.sleep(EXIT_DELAY)
        finally:
            exit_now(status)

    def _exit_behind(self, ranks: list[int]) -> NoReturn:
        if self.rank in ranks:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else "unknown"
            LOGGER.error("rank %s is here:\n%s", self.rank, stack.rstrip())
        else:
            _discard_output()
            time.sleep(EXIT_DELAY)
        exit_now(1)

    def _before_exit(self, text: str) -> None:
        for call in self.before_exit:
            call(text)

    def _send(self, ranks: Iterable[int], **message: Any) -> None:
        for rank in ranks:
            if rank in self._peers:
                self._peers[rank].send(message)

    def _wait_for_end(self, ranks: Iterable[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for rank in ranks:
            while rank in self._peers and not self._peers[rank].has_ended and time.monotonic() < deadline:
                self._peers[rank].receive(deadline - time.monotonic())

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()


def exit_now(status: int) -> NoReturn:
    """End the process from any thread."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _discard_output() -> None:
    """Drop what this process still prints: its main thread may report an error that follows from the failure."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
