"""A machine of a job as machine 0 sees it: this one, or another at the end of a connection. Both take the same
messages, and answer with the same. Others come in through a gate, where they say who they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

from flatout.errors import MachineError
from flatout.parallel.launching.addresses import network_variables
from flatout.parallel.launching.events import Event
from flatout.parallel.launching.facts import Facts
from flatout.parallel.launching.local_ranks import LocalRanks
from flatout.parallel.launching.messages import (
    AllEnded,
    Beats,
    Clock,
    Connection,
    Disconnected,
    Dump,
    Dumped,
    End,
    Ended,
    Forward,
    Hello,
    Message,
    Place,
    Present,
    Refuse,
)
from flatout.parallel.launching.output import Output

BEAT_SECONDS = 1.0
"""Between two messages that say how far the ranks are."""
LOST_SECONDS = 20.0
"""A machine that says nothing for so long is lost."""
HELLO_SECONDS = 10.0
"""That a connection has to say who it is."""
MOST_WAITING = 256
"""Connections that have not said so yet."""


class LocalMachine:
    """The ranks of this machine, which do as they are told."""

    def __init__(self, ranks: LocalRanks, output: Output, tell: Callable[[Event], None], interface: str | None) -> None:
        self.ranks = ranks
        self._output, self._tell, self._interface = output, tell, interface
        self._attempt: int | None = None
        self._all_ended = True
        self._beats_at = 0.0
        self._failing: tuple[int, ...] = ()
        self._answers: list[Message] = []

    def send(self, message: Message) -> None:
        """Do what it says."""
        match message:
            case Place():
                self._start(message)
            case End():
                self.ranks.end(at_once=message.at_once)
                if self._attempt is not None and self._all_ended:  # said before, perhaps to nobody
                    self._answers.append(AllEnded(attempt=self._attempt))
            case Forward():
                self.ranks.forward(message.signal)
            case Dump():
                self.ranks.dump()
            case Clock():
                self._answers.append(Clock(asked_at=message.asked_at, wall_seconds=time.time()))
            case _ if isinstance(message, Event):
                self._tell(message)

    def _start(self, place: Place) -> None:
        variables = network_variables(self._interface) if self._interface else {}
        try:
            self.ranks.start(place, variables)
        except MachineError as error:  # for the others to know; machine 0 answers with it
            self._answers.append(Refuse.of(error))
        self._attempt, self._all_ended, self._beats_at = place.attempt, False, 0.0

    def poll(self) -> list[Message]:
        """What has happened here since the last call."""
        answers, self._answers = self._answers, []
        if self._attempt is None:
            if (now := time.monotonic()) - self._beats_at >= BEAT_SECONDS:  # it waits for other machines
                self._beats_at = now
                answers.append(Present())
            return answers
        answers += [Ended(attempt=self._attempt, end=one) for one in self.ranks.ended()]
        now, failing = time.monotonic(), self.ranks.failing()
        if now - self._beats_at >= BEAT_SECONDS or failing != self._failing:
            self._beats_at, self._failing = now, failing
            answers.append(Beats(attempt=self._attempt, ranks=self.ranks.beats(), failing=failing))
        if (dumped := self.ranks.dumped()) is not None:
            answers.append(Dumped(ranks=dumped))
        if not self._all_ended and self.ranks.all_gone:
            self._all_ended = True
            answers.append(AllEnded(attempt=self._attempt))
        return answers

    @property
    def reader_gone(self) -> bool:
        """Does nobody read the output any more?"""
        return self._output.reader_gone


class RemoteMachine:
    """Another machine, which has said who it is."""

    def __init__(self, connection: Connection, facts: Facts, *, identity: str, node_rank: int | None) -> None:
        self.connection, self.facts, self.identity, self.node_rank = connection, facts, identity, node_rank
        self.slot = -1
        """Its number in the job, once it has one."""
        self.lost: str | None = None
        """Why it takes part no more."""
        self._broken: str | None = None
        """Why nothing can be sent to it."""
        self.has_spoken = False
        """Has it said anything that could be understood?"""

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.connection.heard_at

    def send(self, message: Message) -> None:
        if self.lost is None and self._broken is None:
            try:
                self.connection.send(message)
            except Disconnected as error:
                self._broken = str(error)  # what it said before it went is read first: perhaps why it did

    def poll(self) -> list[Message]:
        """What it has said since the last call; sets `lost` where it has gone."""
        if self.lost is not None:
            return []
        try:
            if self._broken is None:
                self.connection.flush()
        except Disconnected as error:
            self._broken = str(error)
        try:
            messages = self.connection.receive()
        except Disconnected as error:
            self.lost = self._broken or str(error)
            return []
        if not messages and self._broken is not None:
            self.lost = self._broken
            return []
        self.has_spoken = self.has_spoken or bool(messages)
        if not messages and self.silent_seconds > LOST_SECONDS:
            self.lost = f"nothing heard for {self.silent_seconds:.0f} s"
        return messages


class Gate:
    """Machine 0 listens on one address, and lets in machines that say who they are; others are turned away."""

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
