"""flatout run: the user's script in this very process, as the plan says, with what was seen of it at the end.

Nothing is printed unless both output streams are a terminal: a pipe gets the script's own bytes and no others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.cli.command_line import Option, parse_options
from flatout.cli.ended_by_signal import signals_as_exits
from flatout.environment import visible_cuda_devices, with_visible
from flatout.errors import FlatoutError, UsageError
from flatout.script.entry import Target, execute, show_uncaught
from flatout.script.own_modules import own_imports

PLAN_NAME, REPORT_NAME = "flatout.toml", "flatout-run.json"
VERIFICATION_SECONDS = 120.0

OPTIONS: tuple[Option, ...] = (
    Option(
        name="--plan", value="FILE", meaning=f"The plan to run by; otherwise {PLAN_NAME}, if it is for this script."
    ),
    Option(name="--no-plan", meaning="Change nothing; only watch."),
    Option(
        name="--trust-plan",
        meaning="Apply a plan from another machine, torch or arguments without verifying it here first.",
    ),
    Option(name="--without", value="CHOICES", meaning="Leave these choices of the plan off, such as compile,threads."),
    Option(
        name="--device",
        value="NAME",
        meaning="The one GPU that the script sees, as cuda:1 (numbers: flatout check), or cpu: none.",
    ),
    Option(name="--deterministic", meaning="Make the run repeatable to the bit, or fail at what cannot be."),
    Option(
        name="--check-deterministic", meaning="Only check that: two runs of 40 steps as trials, compared; and the cost."
    ),
    Option(name="--allow-network", meaning="Of those two runs, which have only a loopback interface otherwise."),
    Option(name="--report", value="FILE", meaning=f"Where to write the JSON document; otherwise {REPORT_NAME}."),
    Option(name="--no-report", meaning="Write no document."),
    Option(name="--quiet", meaning="No status line and no summary, on a terminal either."),
)


def main(arguments: list[str]) -> int:
    """Run a script. Returns its own exit code, and dies of SIGINT where Python would."""
    options, command = parse_options(arguments, OPTIONS)
    target = Target.from_command(command)
    target.check_exists()
    visible = visible_cuda_devices()
    if "--device" in options:
        from flatout.machine.visible_devices import show_only

        show_only(options["--device"])
    if "--check-deterministic" in options:
        from flatout.cli.check_deterministic import check_deterministic

        return check_deterministic(target, allow_network="--allow-network" in options)
    if "--allow-network" in options:
        raise UsageError("--allow-network without --check-deterministic", limit="a run has the network in any case")
    run = Run(target, options, _report_path(options))
    run.visible_before = visible
    try:
        run.prepare()
    except KeyboardInterrupt:  # no line of the script has run
        run.abandon()
        sys.stderr.write("interrupted\n")
        return 128 + signal.SIGINT
    try:
        run.status = execute(target)
    except UsageError:
        run.abandon()
        raise
    except KeyboardInterrupt as interrupt:
        run.status, run.interrupted = 128 + signal.SIGINT, True
        show_uncaught(interrupt)
        _show_nothing_more()
        raise  # all the way up: Python finalizes, and then dies of the signal
    run.explain_failure()
    return run.status


class Run:
    """What stands around the script: the plan before it, the watch during it, the summary after it."""

    def __init__(self, target: Target, options: dict[str, str], report: Path | None) -> None:
        from flatout.script.runner import Runner

        self.target, self.options, self.report = target, options, report
        self.status: int | None = None
        self.interrupted = False
        """Did the script end by a KeyboardInterrupt that nobody caught?"""
        self.plan: Any = None
        self.notes: list[str] = []
        self.runner = Runner()
        self.line: Any = None
        self._missed: list[str] = []
        self.visible_before: str | None = None
        """CUDA_VISIBLE_DEVICES before --device: a process that starts over reads its options again."""
        self.load: Any = None
        self._machine: Any = None
        self._proved_for: str | None = None
        self._began = time.perf_counter()
        self._show = False
        self._terminal = -1
        self._owner = os.getpid()

    @property
    def on_terminal(self) -> bool:
        return "--quiet" not in self.options and _first_rank() and _is_terminal(sys.stdout) and _is_terminal(sys.stderr)

    def prepare(self) -> None:
        from flatout.script.runner import Runner

        self.plan = self._read_plan()
        if self.plan is not None and "--without" in self.options:
            self.plan = self.plan.without(*(name.strip() for name in self.options["--without"].split(",")))
        if "--deterministic" in self.options:
            self._make_deterministic()
        choices = self._choices()
        self.runner = Runner(choices, self._machine, proved_for=self._proved_for)
        self.runner.at_alarm.append(self._write_early)
        self.runner.install()
        atexit.register(self.finish)  # first in, so last out: after the script's own exit handlers
        self._began = time.perf_counter()
        if self.on_terminal:
            self._terminal = os.dup(sys.stderr.fileno())  # the script may close or replace its streams
            self._show = True
            self._start_line()

    def _make_deterministic(self) -> None:
        from flatout import environment
        from flatout.plan_choices import declared
        from flatout.script.deterministic import make_deterministic

        changed = environment.deterministic_environment()
        if changed is not None:  # the order of hashes is fixed when Python starts
            self._start_over(changed)
        chosen = self.plan.choices() if self.plan is not None else {}
        left_out = [name for name in chosen if not declared()[name].repeatable]
        if self.plan is not None and left_out:
            self.plan = self.plan.without(*left_out)
            self._miss(f"left out, because the run is to be deterministic: {', '.join(left_out)}")
        make_deterministic()

    def abandon(self) -> None:
        """No line of the script has run: there is nothing to report."""
        atexit.unregister(self.finish)
        if self.line is not None:
            self.line.stop()

    def _read_plan(self) -> Any:
        if "--no-plan" in self.options:
            return None
        from flatout.plan import read_plan

        if "--plan" in self.options:
            return _for_scripts(self.options["--plan"], read_plan(self.options["--plan"]))
        if not Path(PLAN_NAME).exists():
            return None
        plan = read_plan(PLAN_NAME)
        if plan.script is not None and not _same_script(plan.script, self.target):
            self._miss(f"{PLAN_NAME} is for {plan.script}: not applied (give --plan to apply it all the same)")
            return None
        return _for_scripts(PLAN_NAME, plan)

    def _choices(self) -> list[Any]:
        if self.plan is None or not self.plan.choices():
            return []
        from flatout.levers.catalogue import LEVERS
        from flatout.levers.lever import choices_of_plan
        from flatout.machine.detect import detect

        self._machine = detect()
        mismatch = self.plan.mismatch(self._machine.fingerprint, self._machine.versions.torch)
        if mismatch is not None and "--trust-plan" not in self.options:
            self._verify(mismatch)
        elif "--trust-plan" not in self.options:
            self._compare_arguments()
        choices = choices_of_plan(self.plan.choices(), LEVERS, self.plan.proved_reduced)
        self._enter_environment(choices)
        return choices

    def _compare_arguments(self) -> None:
        """Other arguments may mean another loop: what was proved in lower precision is applied only to the same one."""
        if self.plan.script is None or self.plan.argv == self.target.arguments:
            return
        tuned, here = (shlex.join(arguments) or "none" for arguments in (self.plan.argv, self.target.arguments))
        self._note(f"the plan was tuned with other arguments ({tuned}; here {here}): tune again with these to be sure")
        self._proved_for = self.plan.loop or ""

    def _verify(self, mismatch: str) -> None:
        """A plan from elsewhere is a suggestion: its choices are tried here, and those that hold are applied."""
        from flatout.tuning.script_tuning import TuneRequest, tune_script

        if self.on_terminal:
            sys.stderr.write(f"{mismatch}: verifying it here first (--trust-plan skips this)\n")
        request = TuneRequest(
            target=self.target, budget_seconds=VERIFICATION_SECONDS, only=tuple(self.plan.choices().items())
        )
        try:
            with signals_as_exits():
                result = tune_script(request, self._machine)
        except FlatoutError as error:
            self._miss(f"{mismatch}, and could not be verified here: {error}")
            self.plan = replace(self.plan, **dict.fromkeys(self.plan.choices()), reasons={})
            return
        held = ", ".join(result.plan.choices()) or "nothing"
        text = f"{mismatch}; verified here: {held} holds (again in every run; flatout tune writes a plan for here)"
        (self._note if result.plan.choices() == self.plan.choices() else self._miss)(text)
        self.plan = result.plan

    def _enter_environment(self, choices: Sequence[Any]) -> None:
        """What only a new process can have (a preloaded allocator) means starting over, once."""
        from flatout import environment

        if any(choice.lever.compiles for choice in choices):
            environment.use_inductor_cache()
        for choice in choices:
            needed = choice.lever.environment(choice.value)
            if (visible := needed.get("CUDA_VISIBLE_DEVICES")) is not None:
                environment.show_cuda_devices(visible)  # CUDA has not started
            library = needed.get("LD_PRELOAD")
            if library and library not in environment.preloaded_libraries():
                self._start_over(environment.with_preloaded(library))

    def _start_over(self, variables: dict[str, str]) -> None:
        os.execve(sys.executable, [*sys.orig_argv], with_visible(variables, self.visible_before))

    def _start_line(self) -> None:
        from flatout.machine.detect import detect
        from flatout.report.live import StatusLine
        from flatout.report.run_text import live_text
        from flatout.script.device_calls import device_name

        self._machine = self._machine or detect()
        flops = self.plan.flops_per_step if self.plan is not None else None
        ceilings = self._machine.ceilings
        record, subject = self.runner.record, self.runner.watch.subject

        def text() -> str:
            return live_text(record, flops, ceilings, self._not_applied(), device_name(subject))

        self.line = StatusLine(self._terminal, text)
        self.line.start()

    def _not_applied(self) -> list[str]:
        """What was taken back during the run, and what did not apply to it."""
        taken = [f"took back {entry.choice.label}" for entry in self.runner.applied.rolled_back]
        return taken + [f"left off {label}: {why}" for label, why in self.runner.left_off]

    def _death(self) -> Any:
        """What is known where the script died of memory; None otherwise."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, Exception) or "torch" not in sys.modules:
            return None
        from flatout.script.memory_death import inspect_death

        path = self.target.path
        folder = os.path.dirname(os.path.realpath(path)) if path else os.getcwd()
        return inspect_death(error, self.runner.watch.subject, folder)

    def explain_failure(self) -> None:
        """Behind the traceback of a script that died under a plan: which levers were on, and how to run without."""
        error, choices = getattr(sys, "last_value", None), self.runner.applied.choices
        if self.status != 1 or error is None or not choices or os.getpid() != self._owner:
            return
        from flatout.script.failure import explain_failure

        message = explain_failure(error, choices, self.options, self.target.command)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(message + "\n")
            sys.stderr.flush()

    def _note(self, text: str) -> None:
        self.notes.append(text)

    def _miss(self, text: str) -> None:
        """A note that something of the plan is not applied."""
        self.notes.append(text)
        self._missed.append(text)

    def finish(self) -> None:
        """Close the watch, write the document, show the summary. Never in a forked child, never with a traceback."""
        if os.getpid() != self._owner:
            return
        try:
            with own_imports():
                if self.line is not None:
                    self.line.stop()
                self._tell_of_plan()
                self._report_all()
        except (Exception, KeyboardInterrupt) as error:
            self._say(f"flatout: no summary: {type(error).__name__}: {error}")
        if self.interrupted:
            _remember_interrupt()

    def _say(self, text: str) -> None:
        """Under the script's output, on a terminal only; the script may have closed its streams."""
        if self._show:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                os.write(self._terminal, (text + "\n").encode())

    def _tell_of_plan(self) -> None:
        """What of the plan is not applied, a line each, where no terminal shows the summary that says it."""
        if self._show or "--quiet" in self.options or not _first_rank():
            return
        lines = [*self._missed, *self._not_applied()]
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.writelines(f"flatout: {line}\n" for line in lines)
            sys.stderr.flush()

    def _report_all(self) -> None:
        if self.report is None and not self._show:
            return
        from flatout.report.document import write_document
        from flatout.report.run_text import run_document, run_text

        self.runner.ended()
        summary = self._summary()
        written = None
        if self.report is not None:
            with contextlib.suppress(UsageError):
                write_document(self.report, run_document(summary))
                written = str(self.report)
            if written is None:
                self._say(f"flatout: {self.report} could not be written")
        self._say("\n" + run_text(summary, written))

    def _write_early(self) -> None:
        """Memory is nearly out: the kernel may end this process with no message, so the document is written now."""
        if self.report is None or os.getpid() != self._owner:
            return
        with own_imports(), contextlib.suppress(UsageError):
            from flatout.report.document import write_document
            from flatout.report.run_text import run_document

            write_document(self.report, run_document(self._summary()))

    def _summary(self) -> Any:
        from flatout.diagnose.run_checks import RunFacts, check_run
        from flatout.machine.detect import detect
        from flatout.machine.process_memory import peak_resident_bytes
        from flatout.report.run_text import RunSummary
        from flatout.script.describe import observe

        wall = time.perf_counter() - self._began
        if self.runner.fault is not None and self.runner.fault not in self.notes:
            self._note(self.runner.fault)
        record, watch, applied = self.runner.record, self.runner.watch, self.runner.applied
        observed = None
        if record.steps:
            observed = observe(watch, threads_at_start=self.runner.threads_at_start, rows=record.rows, loaders=False)
        for label, why in self.runner.left_off:
            if (note := f"left off: {label} ({why})") not in self.notes:
                self._note(note)
        rolled_back = tuple((entry.choice.label, entry.reason) for entry in applied.rolled_back)
        rolled_back += tuple(watch.subject.incidents)
        machine = self._machine or detect()
        death = self._death()
        facts = RunFacts(
            observed=observed,
            steps=record.steps,
            planned=self.plan is not None,
            growth=record.growth(),
            nearly_out=record.nearly_out,
            command=shlex.join(self.target.command),
            rolled_back=rolled_back,
            epochs=self.runner.epochs,
            gpus=_usable_gpus(machine),
        )
        return RunSummary(
            name=self.target.name,
            arguments=self.target.arguments,
            status=self.status,
            wall_seconds=wall,
            began=self._began,
            cpu_seconds=time.process_time(),
            peak_resident_bytes=peak_resident_bytes(),
            record=record,
            observed=observed,
            machine=machine,
            plan=self.plan,
            applied=tuple(choice.label for choice in applied.choices),
            rolled_back=rolled_back,
            plan_notes=tuple(self.notes),
            findings=tuple(check_run(facts)),
            death=death,
        )


def _report_path(options: dict[str, str]) -> Path | None:
    """Where the document goes; a place that was asked for and cannot be written is refused before the script starts."""
    if "--no-report" in options:
        return None
    if not _first_rank():
        return None
    if "--report" not in options:
        return Path(REPORT_NAME).absolute()
    path = Path(options["--report"]).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}", remedy="name a file in a folder that can be written")
    return path


def _usable_gpus(machine: Any) -> tuple[str, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    return tuple(gpu.name for gpu in machine.devices)


def _first_rank() -> bool:
    """Of several processes under torchrun one speaks for all."""
    from flatout import environment

    return (environment.rank() or 0) == 0


def _is_terminal(stream: Any) -> bool:
    """A stream can be None (pythonw), closed, or somebody's object."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _for_scripts(path: str, plan: Any) -> Any:
    """The plan; PlanError where it chooses what no script can be given."""
    from flatout.errors import PlanError

    try:
        plan.check_for("script")
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", limit=error.limit, remedy=error.remedy) from None
    return plan


def _same_script(planned: str, target: Target) -> bool:
    """'train.py', './train.py' and its absolute path are one script."""
    if planned == target.name:
        return True
    both = target.path is not None and not planned.startswith("-m ")
    return both and os.path.realpath(planned) == os.path.realpath(str(target.path))


def _show_nothing_more() -> None:
    """Python shows once more what reaches its top; the hook that is there now is back when the exit handlers run."""
    hook = sys.excepthook

    def show_nothing(kind: Any, error: Any, trace: Any) -> None:
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
