"""Machine 0's door: it listens on one address, and lets in machines that say who they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from flatout.parallel.launching.machines import RemoteMachine
from flatout.parallel.launching.messages import Connection, Disconnected, Hello

HELLO_SECONDS = 10.0
"""That a connection has to say who it is."""
MOST_WAITING = 256
"""Connections that have not said so yet."""


class Gate:
    """Connections that are about to become machines; anything else that connects is turned away."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._waiting: list[tuple[Connection, float]] = []
        self.address = str(listener.getsockname()[0])

    def descriptors(self) -> Iterator[int]:
        yield self._listener.fileno()
        yield from (connection.socket.fileno() for connection, _ in self._waiting)

    def arrivals(self) -> list[tuple[RemoteMachine, str]]:
        """Machines that have come since the last call, each with what it was asked for."""
        now = time.monotonic()
        self._accept(now)
        found, still = [], []
        for connection, since in self._waiting:
            try:
                said = connection.receive(at_most=1)
            except Disconnected:
                connection.close()
                continue
            if said and isinstance(said[0], Hello):
                hello = said[0]
                machine = RemoteMachine(connection, hello.facts, identity=hello.identity, node_rank=hello.node_rank)
                found.append((machine, hello.asked))
            elif said or now - since > HELLO_SECONDS:
                connection.close()
            else:
                still.append((connection, since))
        self._waiting = still
        return found

    def _accept(self, now: float) -> None:
        try:
            while len(self._waiting) < MOST_WAITING:
                self._waiting.append((Connection(self._listener.accept()[0]), now))
        except OSError:  # nobody is there, or has gone again
            pass

    def close(self) -> None:
        self._listener.close()
        for connection, _ in self._waiting:
            connection.close()
