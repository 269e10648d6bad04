"""What machines say to one another: lines of JSON, each one of the dataclasses here, over a connection to machine 0.

Nothing that arrives is run or unpickled. A peer that sends anything else is cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

from flatout.decoding import decode
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.parallel.launching import events
from flatout.parallel.launching.facts import Facts
from flatout.parallel.launching.failure import RankEnd

LONGEST_BYTES = 1 << 20
"""Of a message, and of what waits to be sent."""
READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of a machine."""

    facts: Facts
    identity: str
    """Of this launcher: a connection that breaks is made again under the same."""
    node_rank: int | None
    asked: str
    """What all machines have to be asked for alike, in words."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Machine 0 asks for the time, and the answer."""

    asked_at: float
    """By machine 0's monotonic clock."""
    wall_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Start the ranks of a machine."""

    attempt: int
    """How often ranks were started before."""
    machine: int
    machines: int
    first_rank: int
    ranks: int
    """On all machines."""
    host: str
    port: int
    """Where ranks meet."""
    run: str
    """A name for this job."""


@dataclass(frozen=True, kw_only=True)
class RankBeat:
    """How far a rank is."""

    rank: int
    beats: int
    step: int
    age_seconds: float
    inside: bool


@dataclass(frozen=True, kw_only=True)
class Beats:
    """How far a machine's ranks are; sent regularly, also without any: the machine is there."""

    attempt: int
    ranks: tuple[RankBeat, ...] = ()
    failing: tuple[int, ...] = ()
    """Ranks that have just printed a traceback, and run still."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank has ended."""

    attempt: int
    end: RankEnd


@dataclass(frozen=True, kw_only=True)
class AllEnded:
    """Nothing is left of a machine's ranks."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Print the stacks of all ranks, and say where they are."""


@dataclass(frozen=True, kw_only=True)
class Stands:
    """Where a rank is."""

    rank: int
    where: str | None
    in_users_code: bool


@dataclass(frozen=True, kw_only=True)
class Dumped:
    """The stacks of a machine's ranks that could be had."""

    ranks: tuple[Stands, ...]


@dataclass(frozen=True, kw_only=True)
class End:
    """End the ranks: SIGTERM and, after the grace, SIGKILL; or at once."""

    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Send this signal to all ranks."""

    signal: int


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """A launcher got this signal."""

    signal: int
    at_once: bool = False
    """Not for the first time."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The job has ended."""

    status: int


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """The job cannot be done, or not with this machine: an error's three parts."""

    what: str
    limit: str
    remedy: str
    is_usage: bool

    @classmethod
    def of(cls, error: FlatoutError) -> Refuse:
        return cls(what=error.what, limit=error.limit, remedy=error.remedy, is_usage=isinstance(error, UsageError))

    def error(self) -> FlatoutError:
        kind = UsageError if self.is_usage else MachineError
        return kind(self.what, limit=self.limit, remedy=self.remedy)


@dataclass(frozen=True, kw_only=True)
class Present:
    """Whoever says so is there."""


Message = (
    Hello
    | Clock
    | Place
    | Beats
    | Ended
    | AllEnded
    | Dump
    | Dumped
    | End
    | Forward
    | Signalled
    | Finish
    | Refuse
    | Present
    | events.Event
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}  # Any: each is another dataclass


class Disconnected(Exception):
    """The peer has gone, or speaks another language; says which."""


def decoded(line: bytes) -> Message:
    """Raises ValueError or TypeError for anything but a line that `Connection.send` makes."""
    data = json.loads(line)
    if not isinstance(data, dict) or len(data) != 1:
        raise TypeError("not an object with one field")
    ((name, fields),) = data.items()
    if name not in _KINDS:
        raise TypeError(f"no message {name!r}")
    message: Message = decode(_KINDS[name], fields)
    return message


class Connection:
    """Messages over a socket, without waiting."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.heard_at = time.monotonic()
        self._received = b""
        self._unsent = b""
        self._ended: str | None = None

    @property
    def all_sent(self) -> bool:
        return not self._unsent

    def send(self, message: Message) -> None:
        """Raises Disconnected where the peer has gone, or has read nothing for long."""
        self._unsent += json.dumps({type(message).__name__: dataclasses.asdict(message)}).encode() + b"\n"
        self.flush()
        if len(self._unsent) > LONGEST_BYTES:
            raise Disconnected("it reads nothing")

    def flush(self) -> None:
        """Send what could not be sent before."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Disconnected(error.strerror or "the connection broke") from error

    def receive(self, *, at_most: int | None = None) -> list[Message]:
        """What has arrived, the rest later if it is more than that. Raises Disconnected where the peer has gone, and
        nothing is left to be read."""
        if self._ended is None:
            self._ended = self._read()
        *lines, rest = self._received.split(b"\n")
        taken, later = lines[:at_most], lines[len(lines[:at_most]) :]
        self._received = b"\n".join((*later, rest))
        try:
            messages = [decoded(line) for line in taken]
        except (ValueError, TypeError, RecursionError) as error:
            raise Disconnected("it speaks another language than flatout launch") from error
        if len(rest) > LONGEST_BYTES:
            raise Disconnected("it speaks another language than flatout launch")
        if self._ended and not taken:
            raise Disconnected(self._ended)
        return messages

    def _read(self) -> str | None:
        """Why there is no more to come; None: there may be."""
        try:
            while len(self._received) <= LONGEST_BYTES:
                data = self.socket.recv(READ_BYTES)
                if not data:
                    return "it closed the connection"
                self._received += data
                self.heard_at = time.monotonic()
        except BlockingIOError:
            return None
        except OSError as error:
            return error.strerror or "the connection broke"
        return None

    def close(self) -> None:
        self._read()  # a socket that is closed with something unread may take back what it has sent
        with contextlib.suppress(OSError):
            self.socket.close()
