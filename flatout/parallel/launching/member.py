"""A machine other than machine 0: it connects, says what it is, and does what machine 0 says."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from flatout.errors import FlatoutError, MachineError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching.events import Event, Killing, LeaderLost
from flatout.parallel.launching.facts import Facts
from flatout.parallel.launching.leader import QUICK_TICK_SECONDS, READER_GONE, TICK_SECONDS, what_all_ask
from flatout.parallel.launching.machines import LocalMachine, RemoteMachine
from flatout.parallel.launching.messages import Connection, End, Finish, Hello, Refuse, Signalled
from flatout.parallel.launching.signals import Signals

AGAIN_SECONDS = 0.25
"""Between two attempts to connect."""
CONNECT_SECONDS = 5.0
"""For one attempt."""
_NOT_YET = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ECONNRESET}


class Member:
    """One machine of one job."""

    def __init__(
        self,
        request: Launch,
        facts: Facts,
        local: LocalMachine,
        connection: Connection,
        signals: Signals,
        tell: Callable[[Event], None],
    ) -> None:
        self._request, self._facts, self._local, self._signals, self._tell = request, facts, local, signals, tell
        self._identity = secrets.token_hex(8)
        self._leader = self._met(connection)
        self._signal: int | None = None

    def _met(self, connection: Connection) -> RemoteMachine:
        leader = RemoteMachine(connection, self._facts, identity="", node_rank=0)
        asked, number = what_all_ask(self._request), self._request.node_rank
        leader.send(Hello(facts=self._facts, identity=self._identity, node_rank=number, asked=asked))
        return leader

    def run(self) -> int:
        """Returns the exit status of the job. Raises FlatoutError where it cannot be done, or machine 0 is gone."""
        while True:
            quick = self._local.ranks.are_quick_to_see
            descriptors = [*self._local.ranks.descriptors(), *self._signals.descriptors()]
            if self._leader.lost is None:
                descriptors.append(self._leader.connection.socket.fileno())
            wait(descriptors, TICK_SECONDS if quick else QUICK_TICK_SECONDS)
            for said in self._leader.poll():
                if isinstance(said, Refuse):
                    raise said.error()
                if isinstance(said, Finish):
                    return said.status
                self._local.send(said)
            for answer in self._local.poll():
                self._leader.send(answer)
            for caught in self._signals.taken():
                self._pass_on(caught)
            if self._local.reader_gone and self._signal is None:
                self._end_here()
                return READER_GONE
            if self._leader.lost is not None:
                if self._signal is not None:
                    self._end_here()
                    return 128 + self._signal
                if not self._leader.has_spoken:
                    raise _not_a_leader(self._request)
                self._find_again(self._leader.lost)
                if self._signal is not None:
                    return 128 + self._signal

    def _pass_on(self, caught: Signalled) -> None:
        """Machine 0 decides what happens on all machines; a second signal works here even if it cannot be reached."""
        self._leader.send(caught)
        if self._signal is not None:
            self._local.ranks.end(at_once=True)
        self._signal = self._signal or caught.signal

    def _find_again(self, reason: str) -> None:
        """End the ranks, which cannot go on without machine 0, and connect to it again."""
        self._leader.connection.close()
        address = self._request.address or ""
        self._tell(LeaderLost(address=address, reason=reason, wait_seconds=self._request.join_seconds))
        self._end_here()
        if self._signal is None:
            found = connected(self._request, self._signals, anew=True)
            if found is None:
                self._signal = next((one.signal for one in self._signals.taken()), self._signal)
            else:
                self._leader = self._met(found)

    def _end_here(self) -> None:
        self._local.send(End())
        while not self._local.ranks.all_gone:
            time.sleep(QUICK_TICK_SECONDS)
            self._local.poll()
            for caught in self._signals.taken():
                self._signal = self._signal or caught.signal
                self._tell(Killing())
                self._local.send(End(at_once=True))


def _not_a_leader(request: Launch) -> MachineError:
    assert request.rendezvous is not None
    host, port = request.rendezvous
    return MachineError(
        f"what listens on port {port} of {host} is not flatout launch",
        limit="machine 0 listens there",
        remedy="choose another port in --rendezvous, on all machines; if it is a job of ours, end that first",
    )


def connected(request: Launch, signals: Signals, *, anew: bool = False) -> Connection | None:
    """Connect to machine 0, which may not listen yet. None: a signal came first.

    Raises MachineError where it cannot be reached in time; the reason of the last attempt is in it.
    """
    assert request.rendezvous is not None
    deadline = time.monotonic() + request.join_seconds
    while True:
        try:
            return Connection(socket.create_connection(request.rendezvous, CONNECT_SECONDS))
        except OSError as error:
            if time.monotonic() > deadline or not _may_pass(error):
                raise _unreachable(request, error, anew=anew) from error
        if wait(list(signals.descriptors()), AGAIN_SECONDS):
            return None


def _may_pass(error: OSError) -> bool:
    """Is it worth another attempt? A name may not be known yet, where machines start together."""
    return isinstance(error, TimeoutError | socket.gaierror) or error.errno in _NOT_YET


def _unreachable(request: Launch, error: OSError, *, anew: bool) -> FlatoutError:
    assert request.rendezvous is not None
    host, port = request.rendezvous
    waited = f"within {request.join_seconds:g} s"
    if isinstance(error, socket.gaierror):
        return MachineError(
            f"no host {host} was found {waited}: {error.strerror}",
            limit="machines find machine 0 by its name or address",
            remedy="use an address in --rendezvous, or see whether it resolves with: getent hosts " + host,
        )
    if anew:
        return MachineError(
            f"machine 0 ({request.address}) has gone, and did not come back {waited}",
            limit="it leads the job",
            remedy="see what its launcher says, and whether the network between them is up",
        )
    if error.errno == errno.ECONNREFUSED:
        return MachineError(
            f"nothing listened on port {port} of {host} {waited}",
            limit="machine 0 listens there",
            remedy="start it with the same --rendezvous; if it runs, see which address it listens on",
        )
    reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return MachineError(
        f"cannot reach port {port} of {host} {waited}: {reason}",
        limit="machines connect to machine 0 there",
        remedy="see whether a firewall lets it through, and whether the address is that of a network they share",
    )
