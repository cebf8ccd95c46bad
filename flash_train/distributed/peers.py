"""TCP connections between the first rank and the others, on which short messages travel."""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

CONNECT = 60.0  # seconds to connect all ranks
SILENCE = 30  # seconds until a machine that answers no packet counts as dead

Message = dict[str, Any]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 1, 3"; more than eight are cut."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


class Peer:
    """A connection that carries messages, one JSON object on each line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.has_ended, self._unread = connection, False, b""
        self._messages: list[Message] = []
        for level, option, value in _PROBES:
            connection.setsockopt(level, option, value)

    def send(self, message: Message) -> None:
        with suppress(OSError):  # the other end has died, which `receive` finds
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = CONNECT) -> list[Message]:
        """Return the messages that have arrived; waits for at least a part of one, or for the end."""
        self._read(timeout)
        return self.left_over()

    def first(self) -> Message | None:
        """Return the first message, or None if only a part of it has arrived; the messages behind it are left over."""
        self._read(CONNECT)
        return self._messages.pop(0) if self._messages else None

    def left_over(self) -> list[Message]:
        """Return the messages that arrived together with an earlier one."""
        found, self._messages = self._messages, []
        return found

    def _read(self, timeout: float) -> None:
        self.connection.settimeout(max(timeout, 0.001))
        try:
            arrived = self.connection.recv(65536)
        except TimeoutError:
            return
        except OSError:
            arrived = b""
        self.has_ended = not arrived
        *lines, self._unread = (self._unread + arrived).split(b"\n")
        with suppress(ValueError):  # another program's text
            self._messages += [json.loads(line) for line in lines]


def _probes() -> list[tuple[int, int, int]]:
    """Return keepalive options: a connection to a machine without power or network ends after `SILENCE` seconds."""
    found = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    values = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": SILENCE // 5 - 2,
        "TCP_USER_TIMEOUT": SILENCE * 1000,
    }
    return found + [(socket.IPPROTO_TCP, getattr(socket, k), v) for k, v in values.items() if hasattr(socket, k)]


_PROBES = _probes()


def accept(ranks: int, address: str) -> dict[int, Peer]:
    """Open a port, tell all ranks where it is, and wait for each one's connection."""
    token = secrets.token_hex(16)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=ranks) as server:
        dist.broadcast_object_list([own_address(address), server.getsockname()[1], token], 0)
        return wait_for_peers(server, ranks, token, seconds=CONNECT)


def wait_for_peers(server: socket.socket, ranks: int, token: str, *, seconds: float) -> dict[int, Peer]:
    """Return the connections of the ranks 1, …, ``ranks - 1``.

    It closes connections from programs that do not know the token.

    Raises:
        TimeoutError: a rank did not connect; the message names it.
    """
    deadline, peers, unknown = time.monotonic() + seconds, dict[int, Peer](), set[Peer]()
    server.settimeout(1.0)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(peers) < ranks - 1:
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready and time.monotonic() >= deadline:
                missing = [rank for rank in range(1, ranks) if rank not in peers]
                raise TimeoutError(f"{name_ranks(missing)} did not connect within {seconds:g} s")
            for key, _ in ready:
                if key.data is None:
                    with suppress(OSError):  # the other end has gone
                        peer = Peer(server.accept()[0])
                        unknown.add(peer)
                        selector.register(peer.connection, selectors.EVENT_READ, peer)
                    continue
                peer = key.data
                match peer.first():
                    case {"rank": int(rank), "token": str(given)} if hmac.compare_digest(given, token):
                        peers[rank] = peer
                        unknown.remove(peer)
                        selector.unregister(peer.connection)
                    case None if not peer.has_ended:  # the rest of the message comes later
                        pass
                    case _:
                        selector.unregister(peer.connection)
    for peer in unknown:
        peer.connection.close()
    return peers


def connect(rank: int) -> dict[int, Peer]:
    where: list[Any] = [None, None, None]
    dist.broadcast_object_list(where, 0)
    address, port, token = where
    peer = Peer(socket.create_connection((address, port), CONNECT))
    peer.send({"rank": rank, "token": token})
    return {0: peer}


def own_address(address: str) -> str:
    """Return an address of this machine that all ranks can reach.

    This is the source address of a packet from here to `address`, the address of a machine that all ranks reach. If it
    is a loopback address, then `address` is this machine's own and is returned.
    """
    family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        found = probe.getsockname()[0]
    return address if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found
