"""Start the ranks of a job, and watch them until it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from flatout.errors import MachineError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching import addresses
from flatout.parallel.launching.companions import Guard, orphans_adopted
from flatout.parallel.launching.events import Event, OnlyHere, is_essential
from flatout.parallel.launching.facts import facts_of
from flatout.parallel.launching.leader import Leader
from flatout.parallel.launching.local_ranks import LocalRanks
from flatout.parallel.launching.machines import Gate, LocalMachine
from flatout.parallel.launching.member import Member, connected
from flatout.parallel.launching.messages import Connection
from flatout.parallel.launching.output import Output
from flatout.parallel.launching.signals import Signals


def launch(request: Launch, *, tell: Callable[[Event], None] = lambda event: None, gpus: int | None = None) -> int:
    """Run the job, or this machine's part of it, to its end; what its ranks print is passed on to stdout and stderr.

    tell: called with what happens (flatout.report.launch_text has the words), between two lines of the ranks. gpus: how
    many there are here, for the errors that compare machines.

    Returns the exit status: 0; that of the first rank that failed, 128 + its number for a signal; 124 where ranks hang;
    128 + the signal's number where one ended this process. Nothing that the ranks started is left.

    Raises UsageError for an interface that is not there or a request that does not fit that of other machines,
    MachineError for a port in use, machines that cannot be reached, do not arrive or are not alike.
    """
    if not hasattr(signal, "pthread_sigmask") or sys.platform == "win32":
        raise MachineError("launch on this system", limit="ranks are ended by signals", remedy="use Linux or macOS")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_standard_streams())  # before anything else takes their numbers
        signals = Signals()
        stack.callback(signals.close)
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(signals.watched())
        meeting = _Meeting(request)
        stack.callback(meeting.close)
        output = Output()
        meeting.open(signals)
        if meeting.is_over:
            return 128 + signals.taken()[0].signal
        stack.enter_context(orphans_adopted())
        guard = Guard()
        stack.callback(guard.close)
        ranks = LocalRanks(request, output, guard)
        stack.callback(output.drain, hurried=lambda: signals.came)
        stack.callback(ranks.close)

        def told(event: Event) -> None:
            if not request.quiet or is_essential(event):
                with output.between_lines() as readable:
                    if readable:
                        tell(event)

        if meeting.only_here is not None:
            told(meeting.only_here)
        local = LocalMachine(ranks, output, told, meeting.interface)
        facts = facts_of(request, gpus=gpus)
        if meeting.connection is not None:
            return Member(request, facts, local, meeting.connection, signals, told).run()
        return Leader(request, facts, local, meeting.gate, signals, told, guard.folder).run()


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Those that are closed (`flatout launch ... >&-`) lead nowhere: their numbers would be given to pipes of ours."""
    opened = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened.append(os.open(os.devnull, os.O_RDWR))  # takes the lowest number that is free
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


class _Meeting:
    """How this machine comes together with the others: it listens for them, or connects to the one that does."""

    def __init__(self, request: Launch) -> None:
        self._request = request
        self.gate: Gate | None = None
        self.connection: Connection | None = None
        self.interface: str | None = None
        """The name of the one that ranks use."""
        self.only_here: OnlyHere | None = None
        self.is_over = False
        """Did a signal come first?"""

    def open(self, signals: Signals) -> None:
        named = self._request.interface
        own = addresses.address_of(named) if named is not None else None
        if self._request.nnodes == 1:
            self.interface = addresses.interface_name(own or addresses.LOOPBACK)
            return
        if self._request.node_rank in (0, None) and (gate := self._opened_gate(own)) is not None:
            self.gate = gate
            self.interface = addresses.interface_name(gate.address)
            assert self._request.rendezvous is not None
            if addresses.is_loopback(gate.address) and not _means_loopback(self._request.rendezvous[0]):
                self.only_here = OnlyHere(address=gate.address, host=self._request.rendezvous[0])
            return
        self.connection = connected(self._request, signals)
        if self.connection is None:
            self.is_over = True
            return
        self.interface = addresses.interface_name(own or str(self.connection.socket.getsockname()[0]))

    def _opened_gate(self, own: str | None) -> Gate | None:
        """None: another machine is to lead."""
        assert self._request.rendezvous is not None
        host, port = self._request.rendezvous
        must_lead = self._request.node_rank == 0
        try:
            there = addresses.resolved(host)
        except OSError as error:
            if own is None and must_lead:
                raise MachineError(
                    f"no host {host}: {error.strerror}",
                    limit="machine 0 listens on the rendezvous' address",
                    remedy="put an address into --rendezvous, or name one with --interface",
                ) from error
            there = ()
        leads = must_lead or any(addresses.interface_name(one) is not None for one in there)
        if not leads:
            return None
        ours = [one for one in there if addresses.interface_name(one) is not None]
        address = own or next(iter(ours), None) or there[0]
        try:
            return Gate(addresses.listening(address, port))
        except OSError as error:
            refused = addresses.cannot_listen(address, port, error)
            if must_lead or not addresses.is_in_use(error):
                raise refused from error
            return None  # another launcher of this machine may be machine 0

    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()
        if self.connection is not None:
            self.connection.close()


def _means_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return addresses.is_loopback(host)
    return host == "localhost"
