"""flatout run: the user's script in this very process, as the plan says, with what was seen of it at the end.

Without a terminal a pipe gets the script's own stdout and no other bytes; what a plan cannot do, and how to run without
it where the script fails, is said on stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flatout import environment
from flatout.application.applied_plan import PLAN_NAME, AppliedPlan
from flatout.cli.command_line import Option, parse_options, refuse_others
from flatout.cli.run_devices import check_deterministic, chosen_without, run_on_devices
from flatout.errors import MachineError, UsageError
from flatout.script.entry import Target, execute, show_uncaught
from flatout.script.own_modules import own_imports
from flatout.signals import own_errors_suppressed, signals_as_exits
from flatout.terminal import is_terminal, tell

if TYPE_CHECKING:
    from types import TracebackType

    from flatout.application.live_run import LiveRun, RunPanel
    from flatout.diagnose.run_summary import RunSummary
    from flatout.report.live import Panel
    from flatout.script.process_record import Others, Place, ProcessRecord
    from flatout.script.record_file import RecordFile
    from flatout.script.replicas.replica import Replica

WRITTEN_EVERY_SECONDS = 30.0
"""How often the document is written while the script runs."""
WRITING_SHARE = 0.003
"""Of a run, at most, that this may take."""
REPORT_NAME = "flatout-run.json"

OPTIONS: tuple[Option, ...] = (
    Option(name="--plan", value="FILE", meaning=f"The plan; default: {PLAN_NAME}, if it is for this script."),
    Option(name="--no-plan", meaning="Change nothing; only watch."),
    Option(
        name="--trust-plan",
        meaning="Apply a plan from another machine or torch without verifying it here first, and all of one for "
        "another script or other arguments.",
    ),
    Option(name="--without", value="CHOICES", meaning="Leave out these choices of the plan: compile,threads."),
    Option(
        name="--device", value="NAME", meaning="Use only this device: cuda:1 (numbered as by flatout check) or cpu."
    ),
    Option(
        name="--devices",
        value="N",
        meaning="Train on N GPUs of this machine, or in N processes on its CPU, each on its share of every batch; "
        "auto: all GPUs.",
    ),
    Option(
        name="--batch",
        value="COUNTS",
        meaning="What a batch size in the script counts with --devices: global, the samples of all devices together "
        "(default), or per-device.",
    ),
    Option(
        name="--loss",
        value="KIND",
        meaning="What the script's loss is over its batch, with --devices: mean of its samples, their sum, or terms, a "
        "cross-entropy with ignored targets or weights of classes.",
    ),
    Option(name="--allow-local-batchnorm", meaning="Let batch norms see the share of each device alone."),
    Option(name="--all-ranks-write", meaning="Let every device's process write the script's files, not one alone."),
    Option(name="--prove", meaning="Only compare: the first steps on one device and on those of --devices, in trials."),
    Option(name="--deterministic", meaning="Make the run repeatable bit for bit, or fail at an operation that is not."),
    Option(
        name="--check-deterministic",
        meaning="Only check: run 40 steps twice in trials, compare them, and measure the cost.",
    ),
    Option(
        name="--allow-network",
        meaning="Let those runs, and those of --prove, use the network; by default they have only loopback.",
    ),
    Option(
        name="--report", value="FILE", meaning=f"Where to write the report, a JSON document; default: {REPORT_NAME}."
    ),
    Option(name="--no-report", meaning="Write no report."),
    Option(name="--include-private", meaning="Include the script's arguments, and paths in full, in the report."),
    Option(name="--serve", meaning="Serve a page of this run to this machine alone, and print its URL."),
    Option(name="--quiet", meaning="No status lines and no summary."),
)


def main(arguments: list[str]) -> int:
    """Run a script. Returns its own exit code, and dies of SIGINT where Python would."""
    options, command = parse_options(arguments, OPTIONS)
    target = Target.from_command(command)
    target.check_exists()
    visible = environment.visible_cuda_devices()
    if "--device" in options:
        from flatout.machine.visible_devices import show_only

        show_only(options["--device"])
    if "--no-plan" in options and (stray := [name for name in ("--plan", "--without") if name in options]):
        raise UsageError(f"{stray[0]} with --no-plan", limit="there is no plan then", remedy="leave one of them out")
    if "--no-report" in options and "--report" in options:
        raise UsageError("--report with --no-report", limit="no report is written then", remedy="leave one of them out")
    if "--check-deterministic" in options:
        refuse_others(
            "--check-deterministic", options, ("--device", "--allow-network", "--no-plan", "--no-report", "--quiet")
        )
        return check_deterministic(target, allow_network="--allow-network" in options)
    if "--allow-network" in options and "--prove" not in options:
        raise UsageError(
            "--allow-network without --check-deterministic or --prove", limit="a run has the network in any case"
        )
    rank = _rank()
    if rank is None and (status := run_on_devices(target, options)) is not None:
        return status
    run = Run(target, options, _report_path(target, options, rank), visible, rank)
    try:
        run.prepare()
    except KeyboardInterrupt:  # no line of the script has run
        run.abandon()
        tell("interrupted")
        return 128 + signal.SIGINT
    try:
        run.status = run.shared_end(execute(target))
    except UsageError:
        run.abandon()
        raise
    except KeyboardInterrupt as interrupt:
        run.status, run.interrupted = 128 + signal.SIGINT, True
        run.shared_end(run.status)
        show_uncaught(interrupt)
        _show_nothing_more()
        raise  # all the way up: Python finalizes, and then dies of the signal
    run.explain_failure()
    return run.status


class Run:
    """What stands around the script: the plan before it, the watch during it, the summary after it."""

    def __init__(
        self,
        target: Target,
        options: dict[str, str],
        report: Path | None,
        visible_before: str | None,
        rank: Replica | None = None,
    ) -> None:
        """rank: this process's place in a run on several devices."""
        from flatout.script.runner import Runner

        self.rank = rank
        self.target, self.options, self.report = target, options, report
        self.status: int | None = None
        self.interrupted = False
        """Did the script end by an uncaught KeyboardInterrupt?"""
        self.applied = AppliedPlan(
            target, visible_before=visible_before, announce=self._announce, while_verifying=signals_as_exits
        )
        self.runner = Runner()
        self.panel: Panel | None = None
        self.live: LiveRun | None = None
        self._lines: RunPanel | None = None
        self._began, self._times = time.perf_counter(), os.times()
        self._write_next_at = self._began + WRITTEN_EVERY_SECONDS
        self._show = False
        self._terminal = -1
        self._owner = os.getpid()
        self._records: Path | None = None
        """Where processes that the script starts keep their records."""
        self._record: RecordFile | None = None
        """Of this process, where it is one of several ranks."""
        self._among: tuple[Path, Place] | None = None
        """Where those keep their records, and which of them it is."""

    @property
    def on_terminal(self) -> bool:
        return (
            "--quiet" not in self.options
            and _first_rank(self.rank)
            and is_terminal(sys.stdout)
            and is_terminal(sys.stderr)
        )

    def prepare(self) -> None:
        from flatout.script.runner import Runner

        plan = self.applied
        if "--no-plan" not in self.options:
            plan.read(self.options.get("--plan"), chosen_without(self.options))
        if "--deterministic" in self.options:
            plan.make_deterministic()
        if self.rank is None:
            self._on_one_device()
        else:
            plan.for_ranks(self.rank.count, on_cpu=not self.rank.settings.visible)
        plan.choose(trusted="--trust-plan" in self.options, verifies=self.rank is None)
        if self.rank is not None:
            self.rank.install()  # before the watch, which sees the gradients of all ranks
        self.runner = Runner(plan.choices, plan.machine, proved_for=plan.proved_for)
        self.runner.at_alarm.append(self._write_early)
        self.runner.at_second.append(self._write_now_and_then)
        self.runner.install()
        atexit.register(self.finish)  # first in, so last out: after the script's own exit handlers
        self._began, self._times = time.perf_counter(), os.times()
        self._among = _among_ranks(self.rank)
        if _first_rank(self.rank):
            self._go_live()
        if self._among is not None:
            from flatout.script.record_file import RecordFile

            folder, place = self._among
            self._record = RecordFile(folder, f"rank-{place.rank}", self.runner, place)
        if self.on_terminal:
            self._terminal = os.dup(sys.stderr.fileno())  # the script may close or replace its streams
            self._show = True
            if environment.terminal_has_cursor():
                self._start_panel()
        if self.live is not None:  # last: our own processes are not the script's
            self._follow(self.live)

    def _follow(self, live: LiveRun) -> None:
        """Watch the processes that the script starts, and apply the plan in those that train its loop."""
        from flatout.script.following import follow_children, plan_children

        plan, self._records = self.applied, live.folder
        if self._records is None:
            plan.note_unfollowed(live.fault or "unknown")
            return
        if plan.plan is not None and plan.choices and plan.plan.loop is not None:
            plan_children(self._records, plan.choices, plan.plan.loop)
        follow_children(self._records)

    def _on_one_device(self) -> None:
        """Why the plan's number of devices, if it has one, does not apply."""
        if self.applied.plan is None or self.applied.plan.devices is None:
            return
        why = "this process runs alone"
        if "--devices" in self.options:
            why = f"--devices is {self.options['--devices']}"
        elif "--device" in self.options:
            why = f"--device is {self.options['--device']}"
        elif environment.rank() is not None:
            why = "a launcher has started this process"
        elif (mismatch := self.applied.mismatch()) is not None:
            why = f"{mismatch} (flatout tune --devices auto chooses it for here)"
        self.applied.leave_out(("devices",), why)

    def shared_end(self, status: int) -> int:
        """The script has ended with this status: tell the other ranks. Returns the status of this rank."""
        if self._record is not None:
            self._record.end()  # first: the rank that reports reads it once all ranks have ended
        return status if self.rank is None else self.rank.end(status)

    def abandon(self) -> None:
        """No line of the script has run: there is nothing to report."""
        atexit.unregister(self.finish)
        self._stop_panel()
        if self.live is not None:
            self.live.end(None)

    def _announce(self, text: str) -> None:
        if self.on_terminal:
            sys.stderr.write(f"{text}\n")

    def _go_live(self) -> None:
        from flatout.application.live_run import LiveRun
        from flatout.script.replicas.settings import RUN_FOLDER

        self.live = LiveRun(
            self.target,
            self.runner,
            plan=self.applied.plan,
            notes=self.applied.missed,
            ranks_folder=None if self._among is None else self._among[0],
        )
        if self.rank is not None and self.live.folder is not None:
            self.rank.tell(RUN_FOLDER, str(self.live.folder))
        if "--serve" in self.options:
            tell(f"flatout: {self._served(self.live)}")

    def _served(self, live: LiveRun) -> str:
        """Where the page is, or why there is none: the script runs in either case."""
        from flatout.application.live_run import start_page

        if live.folder is None:
            return f"no page: {live.fault}"
        try:
            return f"this run's page is {start_page(live.folder)}"
        except MachineError as error:
            return f"no page: {error}"

    def _start_panel(self) -> None:
        from flatout.application.live_run import RunPanel
        from flatout.machine.detect import detect
        from flatout.report.live import Panel

        assert self.live is not None
        machine = self.applied.machine = self.applied.machine or detect()
        self._lines = RunPanel(self.live.seen, machine.ceilings)
        self.panel = Panel(self._terminal, self._lines.lines)
        self.panel.start()

    def _stop_panel(self) -> None:
        if self.panel is not None:
            self.panel.stop()
        if self._lines is not None:
            self._lines.close()

    def _not_applied(self) -> list[str]:
        """What was taken back during the run, and what did not apply to it."""
        taken = [f"rolled back {entry.choice.label}: {entry.reason}" for entry in self.runner.applied.rolled_back]
        return taken + [f"left off {label}: {why}" for label, why in self.runner.left_off]

    def explain_failure(self) -> None:
        """Behind the traceback of a script that died under a plan: which levers were on, and how to run without."""
        error, choices = getattr(sys, "last_value", None), self.runner.applied.choices
        if self.status != 1 or error is None or not choices or os.getpid() != self._owner:
            return
        from flatout.script.failure import explain_failure

        tell(explain_failure(error, choices, self.options, self.target.command))

    def finish(self) -> None:
        """Close the watch, write the document, show the summary. Never in a forked child, never with a traceback."""
        if os.getpid() != self._owner:
            return
        try:
            with own_imports():
                self._stop_panel()
                if self._record is not None:
                    self._record.end()
                if self.live is not None:
                    self.live.end(self.status)
                self._tell_of_plan()
                self._report_all()
        except (Exception, KeyboardInterrupt) as error:
            self._warn(f"flatout: no summary: {type(error).__name__}: {error}")
        if self.interrupted:
            _remember_interrupt()

    def _say(self, text: str) -> None:
        """Under the script's output, on a terminal only; the script may have closed its streams."""
        if self._show:
            with contextlib.suppress(Exception):  # a stream of the script's own may lack this, or raise anything
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                if os.isatty(self._terminal):  # else the script has closed it, and the number may be a file's by now
                    os.write(self._terminal, (text + "\n").encode("utf-8", "backslashreplace"))

    def _warn(self, text: str) -> None:
        """What the user must know, on a terminal or not."""
        if self._show:
            self._say(text)
        else:
            tell(text)

    def _tell_of_plan(self) -> None:
        """What of the plan is not applied, a line each, where no terminal shows the summary that says it."""
        if self._show or "--quiet" in self.options or not _first_rank(self.rank):
            return
        lines = [*self.applied.missed, *self._not_applied(), *self._not_in_processes()]
        tell(*(f"flatout: {line}" for line in lines))

    def _others(self, *, ended: bool) -> Others:
        """That trained; read anew each time, because some may still run. ended: the script has, and the last records of
        the other ranks are waited for, which a training loop has no time for."""
        from flatout.script.process_record import Others

        ranks: tuple[ProcessRecord, ...] = ()
        if self._among is not None:
            from flatout.script.record_file import last_records, records_of_others

            folder, place = self._among
            ranks = (last_records if ended else records_of_others)(folder, place.rank or 0)
        return Others(
            started=self._started(),
            ranks=ranks,
            place=None if self._among is None else self._among[1],
            devices=None if self.rank is None else self.rank.count,
        )

    def _started(self) -> tuple[ProcessRecord, ...]:
        """Processes that the script started to train in."""
        from flatout.script.record_file import read_records

        return () if self._records is None else tuple(read_records(self._records))

    def _not_in_processes(self) -> list[str]:
        count = sum(not one.applied for one in self._started())
        if not self.applied.choices or not count:
            return []
        processes = f"{count} processes" if count > 1 else "a process"
        known = self.applied.plan is not None and self.applied.plan.loop is not None
        why = "another loop trains there" if known else "it does not say which loop was tuned"
        return [f"the plan was not applied in {processes} that the script started to train in: {why}"]

    def _of_sharing(self) -> list[str]:
        if self.rank is None:
            return []
        from flatout.report.devices_text import sharing_lines

        return sharing_lines(self.rank.facts(), self.rank.settings)

    def _report_all(self) -> None:
        tells_parent = self.rank is not None and self.rank.number == 0 and "--quiet" not in self.options
        if self.report is None and not self._show and not tells_parent:
            return
        from flatout.report.document import write_document
        from flatout.report.run_text import run_text
        from flatout.script.replicas.settings import SUMMARY

        self.runner.ended()
        summary = self._summary(ended=True)
        written = None
        if self.report is not None:
            try:
                write_document(self.report, self._document(summary))
                written = str(self.report)
            except UsageError as error:
                older = f"; {self.report.name} is an older one" if self.report.is_file() else ""
                self._warn(f"flatout: no report of this run: {error}{older}")
        text = "\n" + run_text(summary, written)
        self._say(text)
        if self.rank is not None and tells_parent:
            self.rank.tell(SUMMARY, text)

    def _write_now_and_then(self, now: float) -> None:
        """A signal or the power may end this process with no chance to write: what it leaves then is not old."""
        if now < self._write_next_at:
            return
        with own_errors_suppressed():  # it is written again when the script has ended
            self._write_early()
        ended = time.perf_counter()
        self._write_next_at = ended + max(WRITTEN_EVERY_SECONDS, (ended - now) / WRITING_SHARE)

    def _write_early(self) -> None:
        """Memory is nearly out: the kernel may end this process with no message, so the document is written now."""
        if self.report is None or os.getpid() != self._owner:
            return
        with own_imports(), contextlib.suppress(UsageError):
            from flatout.report.document import write_document

            write_document(self.report, self._document(self._summary(ended=False)))

    def _document(self, summary: RunSummary) -> dict[str, object]:
        from flatout.report.run_text import run_document

        return run_document(summary, include_private="--include-private" in self.options)

    def _summary(self, *, ended: bool) -> RunSummary:
        from flatout.diagnose.run_summary import summarise

        return summarise(
            self.target,
            self.runner,
            status=self.status,
            plan=self.applied.plan,
            notes=[*self.applied.notes, *self._not_in_processes(), *self._of_sharing()],
            machine=self.applied.machine,
            began=self._began,
            times_before=self._times,
            others=self._others(ended=ended),
        )


def _report_path(target: Target, options: dict[str, str], rank: Replica | None) -> Path | None:
    """Where the document goes; a place that was asked for and cannot be written is refused before the script starts."""
    if "--no-report" in options or not _first_rank(rank):
        return None
    if "--report" not in options:
        try:
            return Path(REPORT_NAME).absolute()
        except FileNotFoundError:
            raise UsageError(
                "the current folder was removed",
                limit=f"{REPORT_NAME} is written there",
                remedy="change to one that exists, or use --no-report",
            ) from None
    from flatout.report.document import report_place
    from flatout.whole_files import check_no_input

    place = report_place(options["--report"])
    read = [target.path, options.get("--plan"), PLAN_NAME]
    check_no_input(place, [Path(one) for one in read if one is not None], "the report", "--report")
    return place


def _rank() -> Replica | None:
    """This process's place in a run on several devices; None: it is in none."""
    folder = environment.ranks_folder()
    if folder is None:
        return None
    from flatout.script.replicas.rank import begin

    return begin(folder)


def _among_ranks(rank: Replica | None) -> tuple[Path, Place] | None:
    """Where this process and those that were started with it keep their records, and its place; None: it is alone."""
    number = environment.rank()
    if rank is None and number is None:
        return None
    from flatout.script.process_record import Place
    from flatout.script.record_file import launchers_folder

    if rank is not None:
        return rank.folder, Place(rank=rank.number, ranks=rank.count)
    folder = launchers_folder()
    return None if folder is None else (folder, Place(rank=number, ranks=environment.world_size()))


def _first_rank(rank: Replica | None) -> bool:
    """Of several processes under torchrun, or in a run on several devices, one speaks for all."""
    if rank is not None:  # its launcher's variables are hidden from the script
        return rank.number == 0
    return (environment.rank() or 0) == 0


def _show_nothing_more() -> None:
    """Python shows once more what reaches its top; the hook that is there now is back when the exit handlers run."""
    hook = sys.excepthook

    def show_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook

    sys.excepthook = show_nothing


def _remember_interrupt() -> None:
    """Python forgets that an interrupt ends it when anything evaluates a string, as `dataclass` does. Tell it again:
    only what Python itself runs as a whole program counts, so one is run.
    """
    try:
        import ctypes
    except ImportError:
        return  # then the exit code is 1
    hook, names = sys.excepthook, ("last_type", "last_value", "last_traceback", "last_exc")
    last = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    sys.excepthook = lambda kind, error, trace: None
    ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")
    sys.excepthook = hook
    for name, value in last.items():
        setattr(sys, name, value)
