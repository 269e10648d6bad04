"""Machine 0 decides: which machines take part, which rank failed first, whether all are started again, and the end.

gather -> start on all -> (all ended | a rank failed | ranks hang | a machine is lost | one comes back | a signal)
             ^                          |
             +---- end all, gather -----+
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching import addresses
from flatout.parallel.launching.attempt import Attempt
from flatout.parallel.launching.companions import Store
from flatout.parallel.launching.events import (
    Again,
    ClockDiffers,
    Event,
    Killing,
    MachineBack,
    MachineLost,
    MachinesReady,
    NoneJudged,
    RankFailed,
    RanksHang,
    Stopping,
)
from flatout.parallel.launching.facts import Facts, first_difference
from flatout.parallel.launching.failure import RankEnd
from flatout.parallel.launching.machines import BEAT_SECONDS, Gate, LocalMachine, RemoteMachine
from flatout.parallel.launching.messages import (
    AllEnded,
    Clock,
    Dump,
    Dumped,
    End,
    Finish,
    Forward,
    Message,
    Place,
    Present,
    Refuse,
    Signalled,
    Stands,
)
from flatout.parallel.launching.signals import Signals

TICK_SECONDS = 0.1
QUICK_TICK_SECONDS = 0.02
"""Where the system does not tell of the end of a process."""
DUMP_SECONDS = 6.0
CLOCK_SECONDS = 2.0
"""Clocks that differ by more are reported: files would seem to be from the future."""
RETURN_SECONDS = 15.0
"""For a lost machine to come back, where the job can go on without it."""
GONE_SECONDS = 5 * BEAT_SECONDS
"""Of silence: a machine that has the same number is then taken for this one, started again."""
END_SECONDS = 60.0
"""Beyond the grace: for a machine to say that nothing is left of its ranks."""
FINISH_SECONDS = 2.0
READER_GONE = 141
"""Exit status where nobody reads the output any more: 128 + SIGPIPE."""
HUNG = 124
"""Exit status where ranks hang: that of `timeout`."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How an attempt ended."""

    status: int
    event: RankFailed | RanksHang | MachineLost | MachineBack | None = None
    """What is told; None: nothing has to be said."""


class Leader:
    """One job."""

    def __init__(
        self,
        request: Launch,
        facts: Facts,
        local: LocalMachine,
        gate: Gate | None,
        signals: Signals,
        tell: Callable[[Event], None],
        folder: Path,
    ) -> None:
        self._folder = folder
        self._request, self._facts, self._local, self._gate, self._signals = request, facts, local, gate, signals
        self._tell_here = tell
        self._host = gate.address if gate is not None else addresses.LOOPBACK
        self._run = secrets.token_hex(8)
        self._asked = what_all_ask(request)
        self._others: list[RemoteMachine] = []
        self._store: Store | None = None
        self._attempt, self._failures = 0, 0
        self._signal: int | None = None
        self._kill_wanted = False
        self._present_at = 0.0
        self._new_here: list[RemoteMachine] = []
        """Machines that came while ranks ran."""

    def run(self) -> int:
        """Returns the exit status. Raises FlatoutError where the job cannot be done."""
        try:
            self._gather(self._request.join_seconds)
            while self._signal is None:
                verdict = self._attempted()
                if self._signal is not None or verdict.event is None or not self._goes_on(verdict):
                    return self._finished(verdict.status)
                self._end_all()
                self._close_store()
                self._attempt += 1
                if self._signal is None:
                    self._gather_again()
            return self._finished(128 + self._signal)
        except FlatoutError as error:
            self._refuse_all(error)
            raise
        finally:
            self._close_store()

    # who takes part

    def _gather(self, seconds: float) -> None:
        """Wait until all machines are there. Raises FlatoutError where they are not, or are not alike."""
        deadline = time.monotonic() + seconds
        while len(self._others) + 1 < self._request.nnodes and self._signal is None:
            left = deadline - time.monotonic()
            if left <= 0:
                if len(self._others) + 1 >= self._least:
                    break
                raise self._too_few(seconds)
            self._turn(left)
            for gone in (one for one in self._others if one.lost is not None):
                gone.connection.close()
            self._others = [one for one in self._others if one.lost is None]
            self._let_in()
        self._check_alike()

    @property
    def _least(self) -> int:
        return self._request.min_nnodes or self._request.nnodes

    def _too_few(self, seconds: float) -> MachineError:
        there = ", ".join(f"{number} ({facts.host})" for number, facts in self._machines())
        verb = "arrived" if self._attempt == 0 else "are left, and no other came"
        return MachineError(
            f"{len(self._others) + 1} of {self._request.nnodes} machines {verb} within {seconds:g} s: {there}",
            limit=f"the job needs {self._least}",
            remedy=f"run the same command on each, with --rendezvous {self._request.address}; see what it says there",
        )

    @property
    def _all(self) -> list[LocalMachine | RemoteMachine]:
        return [self._local, *self._others]

    def _machines(self) -> list[tuple[int, Facts]]:
        return [(0, self._facts), *((one.slot, one.facts) for one in self._others)]

    def _let_in(self) -> None:
        """Give machines that have come a number."""
        for machine in self._new_here:
            wanted = machine.node_rank
            taken = {one.slot: one for one in self._others}
            if wanted is None:
                wanted = next((slot for slot in range(1, self._request.nnodes) if slot not in taken), None)
            if wanted is None or wanted == 0 or wanted in taken:
                self._turn_away(machine, wanted, taken)
                continue
            machine.slot = wanted
            self._others.append(machine)
            machine.send(Clock(asked_at=time.monotonic()))
        self._new_here = []
        self._others.sort(key=lambda one: one.slot)

    def _turn_away(self, machine: RemoteMachine, wanted: int | None, taken: dict[int, RemoteMachine]) -> None:
        if wanted is None:
            what = f"the job has its {self._request.nnodes} machines already"
            remedy = "use another port in --rendezvous for another job"
        else:
            host = self._facts.host if wanted == 0 else taken[wanted].facts.host
            what = f"--node-rank {wanted} is that of {host} already"
            remedy = "give each machine its own number, or none"
        _refuse(machine, UsageError(what, limit=f"machines are 0 to {self._request.nnodes - 1}", remedy=remedy))

    def _check_alike(self) -> None:
        found = first_difference(self._machines())
        if found is not None:
            raise found

    def _gather_again(self) -> None:
        """After a failure: without those that are lost, with those that have come; wait for what is missing."""
        self._let_in()
        enough = len(self._others) + 1 >= self._least
        self._gather(min(RETURN_SECONDS, self._request.join_seconds) if enough else self._request.join_seconds)

    # one attempt

    def _attempted(self) -> Verdict:
        """Start the ranks, and watch them until something has to be done."""
        self._start_all()
        watched = Attempt(self._attempt, self._request.nproc_per_node * (len(self._others) + 1))
        while True:
            for machine, message in self._turn(watched.patience_seconds):
                if isinstance(message, Refuse):
                    raise message.error()
                watched.note(machine, message)
            if self._store is not None and watched.anything_failed:
                self._store.check()
            if self._signal is not None:
                return self._interrupted(watched)
            if (lost := next((one for one in self._others if one.lost is not None), None)) is not None:
                return self._lost(lost)
            if (failed := watched.failed()) is not None:
                return self._rank_failed(failed, watched.left_early(failed))
            if watched.all_ended and len(watched.gone) == len(self._others) + 1:
                return Verdict(status=0)
            if watched.hangs(self._request.hang_seconds):
                return self._hung(watched)
            if (waited := watched.unjudged_seconds(self._request.hang_seconds)) is not None:
                self._tell(NoneJudged(waited_seconds=waited))
            if self._local.reader_gone:
                self._end_all()
                return Verdict(status=READER_GONE)
            if self._new_here:
                back = self._new_here[0]
                return Verdict(status=1, event=MachineBack(machine=back.facts.host))

    def _start_all(self) -> None:
        listener = addresses.listening(self._host, 0)
        port = int(listener.getsockname()[1])
        count, here = len(self._others) + 1, self._request.nproc_per_node
        log = self._folder / f"store-{self._attempt}"
        self._store = Store(listener, at_once=count * here > 1, log=log)
        hosts = tuple(facts.host for _, facts in self._machines())
        if self._request.nnodes > 1:
            self._tell(MachinesReady(machines=hosts, ranks=count * here, restarts=self._attempt))
        place = Place(
            attempt=self._attempt,
            machine=0,
            machines=count,
            first_rank=0,
            ranks=count * here,
            host=self._host,
            port=port,
            run=self._run,
        )
        for number, machine in enumerate(self._all):
            machine.send(replace(place, machine=number, first_rank=number * here))

    def _host_of(self, rank: int) -> str | None:
        """The name of a rank's machine; None: there is only one."""
        if self._request.nnodes == 1:
            return None
        return self._machines()[rank // self._request.nproc_per_node][1].host

    def _rank_failed(self, end: RankEnd, left_early: tuple[int, ...]) -> Verdict:
        event = RankFailed(
            rank=end.rank,
            ranks=self._request.nproc_per_node * (len(self._others) + 1),
            machine=self._host_of(end.rank),
            status=end.status,
            signal=end.signal,
            exception=end.exception and f"{end.exception}{_said_of(left_early)}",
            where=end.where,
        )
        return Verdict(status=end.exit_code, event=event)

    def _lost(self, machine: RemoteMachine) -> Verdict:
        name = f"machine {machine.slot} ({machine.facts.host})"
        return Verdict(status=1, event=MachineLost(machine=name, reason=machine.lost or ""))

    def _hung(self, watched: Attempt) -> Verdict:
        silent = watched.silent_seconds()
        slowest = watched.slowest()
        for machine in self._all:
            machine.send(Dump())
        stands: dict[int, Stands] = {}
        answers, deadline = 0, time.monotonic() + DUMP_SECONDS
        while answers <= len(self._others) and time.monotonic() < deadline and not self._kill_wanted:
            for _, message in self._turn(TICK_SECONDS):
                if isinstance(message, Dumped):
                    answers += 1
                    stands.update({one.rank: one for one in message.ranks})
        own = [rank for rank in slowest if rank in stands and stands[rank].in_users_code]
        named = tuple(own if len(slowest) > 1 and len(own) == 1 else slowest)
        event = RanksHang(
            ranks=named,
            of=watched.count,
            machine=self._host_of(named[0]) if len(named) == 1 else None,
            silent_seconds=silent,
            step=watched.beats[named[0]][0].step,
            where=stands[named[0]].where if named[0] in stands else None,
        )
        return Verdict(status=HUNG, event=event)

    # what follows

    def _goes_on(self, verdict: Verdict) -> bool:
        """Say what happened; True: the ranks are to be started again."""
        event = verdict.event
        assert event is not None
        if isinstance(event, MachineBack):
            self._tell(event)
            return True
        again = None
        if self._failures < self._request.max_restarts:
            self._failures += 1
            again = Again(restart=self._failures, of=self._request.max_restarts)
        self._tell(replace(event, again=again))
        if again is None:
            self._end_all()
        return again is not None

    def _interrupted(self, watched: Attempt) -> Verdict:
        """A signal: pass it on, so that each rank can save, and wait for them; a second one kills.

        Whoever presses Ctrl-C sees whether they end, and may do so again. A scheduler sends SIGTERM once.
        """
        assert self._signal is not None
        for machine in self._all:
            machine.send(Forward(signal=self._signal))
        deadline = None if self._signal == signal.SIGINT else time.monotonic() + self._request.grace_seconds
        ended = watched.ended_count
        while len(watched.gone | {one.slot for one in self._others if one.lost is not None}) <= len(self._others):
            late = deadline is not None and time.monotonic() > deadline
            if self._kill_wanted or late:
                if not self._kill_wanted:
                    self._tell(Killing())
                self._end_all(at_once=True)
                break
            if watched.hangs(self._request.hang_seconds):
                event = self._hung(watched).event
                assert event is not None
                self._tell(event)
                self._end_all(at_once=self._kill_wanted)
                break
            for number, message in self._turn(TICK_SECONDS):
                watched.note(number, message)
            if deadline is None and watched.ended_count > ended:  # those that wait for it would wait for ever
                deadline = time.monotonic() + self._request.grace_seconds
        return Verdict(status=128 + self._signal)

    def _end_all(self, *, at_once: bool = False) -> None:
        """Until nothing is left of the ranks; machines that are lost have to do so themselves."""
        gone: set[int] = set()  # said anew by each that is asked
        machines = self._all
        for machine in machines:
            machine.send(End(at_once=at_once))
        deadline = time.monotonic() + self._request.grace_seconds + END_SECONDS
        while not gone >= {0, *(one.slot for one in self._others if one.lost is None)}:
            for number, message in self._turn(TICK_SECONDS):
                if isinstance(message, AllEnded):
                    gone.add(number)
            if self._local.ranks.all_gone:
                gone.add(0)
            if self._kill_wanted and not at_once:
                at_once = True
                for machine in machines:
                    machine.send(End(at_once=True))
            if time.monotonic() > deadline:
                for one in self._others:
                    if one.slot not in gone:
                        one.lost = one.lost or "its ranks do not end"
        for one in self._others:
            if one.lost is not None:
                one.connection.close()
        self._others = [one for one in self._others if one.lost is None]

    def _finished(self, status: int) -> int:
        for machine in [*self._others, *self._new_here]:
            machine.send(Finish(status=status))
        self._send_rest()
        return status

    def _refuse_all(self, error: FlatoutError) -> None:
        for machine in [*self._others, *self._new_here]:
            machine.send(Refuse.of(error))
        self._send_rest()

    def _send_rest(self) -> None:
        """What the others are told last has to leave before this process ends."""
        deadline = time.monotonic() + FINISH_SECONDS
        for machine in [*self._others, *self._new_here]:
            while machine.lost is None and not machine.connection.all_sent and time.monotonic() < deadline:
                machine.poll()
                time.sleep(0.01)
            machine.connection.close()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    # one turn

    def _turn(self, patience_seconds: float) -> list[tuple[int, Message]]:
        """Wait a little, and return what the machines said, each with its number. Signals and arrivals are noted."""
        quick = self._local.ranks.are_quick_to_see
        wait(list(self._descriptors()), min(patience_seconds, TICK_SECONDS if quick else QUICK_TICK_SECONDS))
        found = [(0, message) for message in self._local.poll()]
        for machine in self._others:
            found += [(machine.slot, message) for message in machine.poll()]
        found += [(0, one) for one in self._signals.taken()]
        for number, message in found:
            if isinstance(message, Signalled):
                self._note_signal(number, message)
            elif isinstance(message, Clock) and message.wall_seconds is not None:
                self._compare_clock(number, message)
        self._note_arrivals()
        if (now := time.monotonic()) - self._present_at > BEAT_SECONDS:
            self._present_at = now
            for machine in self._others:
                machine.send(Present())
        return found

    def _descriptors(self) -> Iterator[int]:
        yield from self._local.ranks.descriptors()
        yield from self._signals.descriptors()
        if self._gate is not None:
            yield from self._gate.descriptors()
        yield from (one.connection.socket.fileno() for one in self._others if one.lost is None)

    def _note_signal(self, number: int, message: Signalled) -> None:
        if self._signal is None:
            self._signal = message.signal
            self._tell(Stopping(signal=message.signal, machine=self._name_of(number)))
        elif message.at_once and not self._kill_wanted:
            self._kill_wanted = True
            self._tell(Killing())

    def _name_of(self, number: int) -> str | None:
        if self._request.nnodes == 1:
            return None
        return next((facts.host for slot, facts in self._machines() if slot == number), None)

    def _compare_clock(self, number: int, message: Clock) -> None:
        """Against the middle of the time that question and answer took."""
        assert message.wall_seconds is not None
        taken = time.monotonic() - message.asked_at
        ahead = message.wall_seconds - (time.time() - taken / 2)
        if abs(ahead) > CLOCK_SECONDS + taken / 2:
            self._tell(ClockDiffers(machine=self._name_of(number) or "", seconds=ahead))

    def _note_arrivals(self) -> None:
        if self._gate is None:
            return
        for machine, asked in self._gate.arrivals():
            if asked != self._asked:
                _refuse(
                    machine,
                    UsageError(
                        f"asked for {asked} here, and for {self._asked} on machine 0 ({self._facts.host})",
                        limit="all machines of a job are asked for the same",
                        remedy="run the same command on each, but for --node-rank",
                    ),
                )
                continue
            if self._attempt or self._store is not None:  # the first time, all are compared once all are there
                found = first_difference([(0, self._facts), (machine.node_rank or 1, machine.facts)])
                if found is not None:
                    _refuse(machine, found)
                    continue
            self._new_here = [one for one in self._new_here if not _same(one, machine)]
            for old in self._others:
                if _same(old, machine):
                    old.lost = old.lost or "its connection broke"
            if (
                self._store is not None
                and len(self._others) + 1 >= self._request.nnodes
                and all(one.lost is None for one in self._others)
            ):
                self._turn_away(machine, None, {})
                continue
            taken = {one.slot: one for one in self._others if one.lost is None}
            if machine.node_rank == 0 or machine.node_rank in taken:  # before ranks are ended for its sake
                self._turn_away(machine, machine.node_rank, taken)
                continue
            self._new_here.append(machine)

    def _tell(self, event: Event) -> None:
        self._tell_here(event)
        for machine in self._others:
            machine.send(event)


def _same(one: RemoteMachine, other: RemoteMachine) -> bool:
    """Are they the same machine, which connects again: its launcher, or another one after its end? Two launchers that
    are both there and were given one number are not."""
    if one.identity == other.identity:
        return True
    gone = one.lost is not None or one.silent_seconds > GONE_SECONDS
    return gone and one.node_rank is not None and one.node_rank == other.node_rank


def what_all_ask(request: Launch) -> str:
    """What has to be the same on all machines, in words."""
    least = request.min_nnodes or request.nnodes
    machines = f"{request.nnodes} machines" if least == request.nnodes else f"{least} to {request.nnodes} machines"
    return f"{machines} with {request.max_restarts} restarts"


def _refuse(machine: RemoteMachine, error: FlatoutError) -> None:
    machine.send(Refuse.of(error))
    machine.connection.close()


def _said_of(left_early: tuple[int, ...]) -> str:
    """Of ranks that others waited for, though they had ended."""
    if not left_early:
        return ""
    named = f"rank{'s' * (len(left_early) > 1)} {', '.join(map(str, left_early))}"
    return f"; {named} had ended, with exit status 0"
