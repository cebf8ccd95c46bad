"""The watch ends every rank when one fails, dies or hangs, although the others wait in no collective."""

import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from flash_train.distributed.peers import Peer, name_ranks, own_address, wait_for_peers
from flash_train.distributed.watch import ranks_behind
from tests.support.processes import Process

RANKS = 3


def run(tmp_path: Path, action: str) -> tuple[list[int], list[str], list[str]]:
    """Run three ranks: the exit code, standard output and standard error of each."""
    ranks = [
        Process("tests.support.distributed.watched_ranks", tmp_path / "store", rank, RANKS, action)
        for rank in range(RANKS)
    ]
    try:
        # A stopped rank does not end by itself; where Lightning or torchrun started it, they kill it
        ended = [rank.communicate() for i, rank in enumerate(ranks) if action != f"stop {i}"]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], *map(list, zip(*ended, strict=True))


@pytest.mark.parametrize(("dead", "speaker"), [(0, 1), (1, 0), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_all(tmp_path, dead, speaker):
    codes, _, errors = run(tmp_path, f"kill {dead}")
    seconds = time.time() - (tmp_path / "store.killed").stat().st_mtime
    assert codes == [-signal.SIGKILL if rank == dead else 1 for rank in range(RANKS)]
    lines = [errors[rank].splitlines() for rank in range(RANKS)]
    assert [len(each) for each in lines] == [int(rank == speaker) for rank in range(RANKS)], errors
    assert lines[speaker][0].startswith(f"flash-train: rank {dead} has died") and seconds < 60


@pytest.mark.parametrize("failed", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_exception_ends_all_once_its_rank_has_reported_it(tmp_path, failed):
    codes, out, _ = run(tmp_path, f"error {failed}")
    assert codes == [5] * RANKS
    assert out[failed] == f"reported by {failed}\nlast words\n"
    assert not any(out[rank] for rank in range(RANKS) if rank != failed)
    if failed > 0:
        assert (tmp_path / "store.reason0").read_text() == f"rank {failed}: ValueError: a mistake"


@pytest.mark.parametrize("kind", ["error", "shared"])
def test_one_rank_reports_what_all_have(tmp_path, kind):
    codes, out, _ = run(tmp_path, f"{kind} all")
    assert codes == [5] * RANKS
    assert "".join(out).count("last words") == 1
    assert kind == "error" or "last words" in out[0]


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_hangs_is_named_and_says_where_it_is(tmp_path, late):
    codes, _, errors = run(tmp_path, f"hang {late}")
    assert codes == [1] * RANKS
    assert errors[0].startswith(f"flash-train: rank {late} did not arrive at a collective within the timeout of 3 s")
    assert f"rank {late} is here:" in errors[late] and "in sleep_for_ever" in errors[late]
    assert not errors[1]


@pytest.mark.slow
def test_a_rank_that_cannot_answer_is_named(tmp_path):
    codes, _, errors = run(tmp_path, "stop 1")
    assert codes == [1, -signal.SIGKILL, 1]
    assert errors[0].startswith("flash-train: rank 1 did not arrive at a collective")


@pytest.mark.parametrize("action", [pytest.param("wait", marks=pytest.mark.slow), "leave"])
def test_healthy_ranks_are_left_alone(tmp_path, action):
    codes, out, errors = run(tmp_path, action)
    assert codes == [0] * RANKS and not any(out) and not any(errors)


def test_slow_ranks_connect_in_spite_of_other_programs():
    def say_hello(seconds, **hello):
        peer = Peer(socket.create_connection(server.getsockname()[:2]))
        time.sleep(seconds)
        text = json.dumps(hello).encode() + b"\n"
        peer.connection.sendall(text[:9])
        time.sleep(0.1)
        peer.connection.sendall(text[9:] + b'{"begun": 5}\n')  # the next message may arrive together with the first
        return peer

    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = socket.create_connection(server.getsockname())
        strangers = [silent, say_hello(0), say_hello(0, rank=1, token="guessed")]
        slow = [threading.Thread(target=say_hello, args=(3,), kwargs={"rank": r, "token": "known"}) for r in (1, 2)]
        for thread in slow:
            thread.start()
        peers = wait_for_peers(server, 3, "known", seconds=60)
        for thread in slow:
            thread.join()
        assert sorted(peers) == [1, 2] and strangers
        assert [peers[rank].left_over() for rank in (1, 2)] == [[{"begun": 5}]] * 2
        with pytest.raises(TimeoutError, match="^ranks 1, 2 did not connect within 0.2 s$"):
            wait_for_peers(server, 3, "known", seconds=0.2)


def test_ranks_behind():
    assert ranks_behind([4, 4, 4]) == []
    assert ranks_behind([4, 3, 5, 5]) == [0, 1]


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3" and name_ranks([1, 4]) == "ranks 1, 4"
    assert name_ranks(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_an_address_that_is_this_machine_is_kept(address):
    assert own_address(address) == address
