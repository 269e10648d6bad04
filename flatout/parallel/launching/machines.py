"""A machine of a job as machine 0 sees it: this one, or another at the end of a connection. Both take the same
messages, and answer with the same."""

from __future__ import annotations

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
            self._answers.append(Refuse(what=error.what, limit=error.limit, remedy=error.remedy, is_usage=False))
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

    def descriptors(self) -> Iterator[int]:
        return self.ranks.descriptors()


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
