"""`flatout.run`: a script in a process of its own, as `flatout run` runs it, and what was seen of it.

ran = flatout.run("train.py", ["--epochs", "3"])
ran.status, ran.steps, ran.step_seconds
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flatout.arguments import as_path, as_plan, wrong
from flatout.diagnose.finding import Finding
from flatout.errors import UsageError
from flatout.machine.visible_devices import visible_setting
from flatout.plan import Plan, read_plan, write_plan
from flatout.report.document import Document, read_document, report_place
from flatout.script.child_command import child_command
from flatout.script.entry import Target
from flatout.script.replicas.starting import device_count
from flatout.temporary_folders import temporary_folder
from flatout.timing import Measurement


@dataclass(frozen=True, kw_only=True)
class NotApplied:
    """A choice of the plan that was not in force to the end."""

    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a script ended, and what was seen of it; None: not known, as of a process that was killed."""

    status: int
    """The script's own exit status; 128 + the number of a signal that ended it."""
    steps: int | None
    """Training steps; 0: none was found."""
    measurement: Measurement | None
    """Seconds of the sampled steps, with what speaks against them."""
    peak_resident_bytes: int | None
    """Of the process, on the host."""
    findings: tuple[Finding, ...] = ()
    applied: tuple[str, ...] = ()
    """The choices of the plan that were in force."""
    not_applied: tuple[NotApplied, ...] = ()
    notes: tuple[str, ...] = ()
    """What was said of the plan as a whole, such as that flatout.toml is for another script."""
    document: Document | None = field(default=None, repr=False)
    """All that `flatout run` writes to flatout-run.json."""
    stdout: str | None = None
    """With capture_output."""
    stderr: str | None = None

    @property
    def ok(self) -> bool:
        """Did the script end with status 0?"""
        return self.status == 0

    @property
    def step_seconds(self) -> float | None:
        """The median of the sampled steps."""
        return None if self.measurement is None else self.measurement.median_seconds

    def _repr_html_(self) -> str:
        """In a notebook: the verdict, and what was found."""
        from flatout.report.html.verdicts import verdict_html

        payload = self.document or {"script": {"status": self.status}}
        return verdict_html("run", payload, tuple((one.severity, one.title) for one in self.findings))

    def to_json(self) -> dict[str, object]:
        """The document, and the exit status as the parent saw it."""
        return {**(self.document or {}), "status": self.status}


def run(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    plan: Plan | str | os.PathLike[str] | None = None,
    without: Sequence[str] = (),
    trust_plan: bool = False,
    deterministic: bool = False,
    device: str | None = None,
    devices: int | str | None = None,
    report: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    capture_output: bool = False,
) -> RunResult:
    """Run an unmodified script in a process of its own, with a plan, and return what was seen of it.

    script: its path, or with module=True the name of a module, as after `python -m`. plan: a Plan, or the path of one;
    None: flatout.toml in the current folder, if it is for this script; Plan(): the script as it is, only watched. A
    plan from another machine or torch is verified first, unless trust_plan is set. without: choices of the plan to
    leave off. deterministic: make the run repeatable bit for bit. device: the one GPU that the script sees, as
    "cuda:1", or "cpu" for none. devices: train on so many GPUs of this machine, or in so many processes on its CPU,
    each on its share of every batch; "auto": all GPUs. report: where to write the JSON document; nothing is written
    otherwise. quiet: no status lines and no summary on a terminal. capture_output: keep what the script prints, as
    `stdout` and `stderr`, and give it nothing to read; otherwise it has this process's streams.

    Returns a RunResult. A script that fails is a result with its exit status. Raises UsageError for a script or a
    module that is not there, and for options that mean nothing; PlanError for a plan that no script can be given.
    """
    target = as_target(script, arguments, module=module)
    target.check_exists()
    if module:
        _check_module(str(target.module))
    if isinstance(without, str):
        raise wrong("without", without, "it is a list of choices", f"write [{without!r}]")
    chosen = as_plan(read_plan(plan) if isinstance(plan, str | os.PathLike) else plan, "script")
    chosen.without(*without)  # PlanError for what is no choice
    if device is not None:
        visible_setting(device)  # UsageError where there is no such device
    if devices is not None:
        device_count(str(devices), on_cpu=device == "cpu")  # UsageError where there are not so many
    with temporary_folder("run") as folder:
        written = folder / "run.json" if report is None else report_place(as_path(report, "report"))
        options = ["--report", str(written)]
        if plan is not None and not chosen.choices():
            options += ["--no-plan"]
        elif plan is not None:
            write_plan(folder / "plan.toml", chosen, include_private=True)
            options += ["--plan", str(folder / "plan.toml")]
        options += ["--without", ",".join(without)] if without else []
        options += ["--device", device] if device is not None else []
        options += ["--devices", str(devices)] if devices is not None else []
        asked = {"--trust-plan": trust_plan, "--deterministic": deterministic, "--quiet": quiet}
        options += [name for name, wanted in asked.items() if wanted]
        before = _stamp(written)
        done = _done([*options, *target.command], capture_output)
        document = read_document(written, "run") if _stamp(written) != before else None
    return _result(done, document)


def as_target(script: str | os.PathLike[str], arguments: Sequence[str] = (), *, module: bool = False) -> Target:
    """module: `script` is the name of a module, as after `python -m`. Raises UsageError for what is no command line."""
    if isinstance(arguments, str):
        raise wrong("arguments", arguments, "it is a list of words", 'for example ["--lr", "0.1"]')
    words = tuple(os.fspath(word) if isinstance(word, os.PathLike) else word for word in arguments)
    for word in words:
        if not isinstance(word, str):
            raise wrong("an argument", word, "each of them is a text", "write numbers as texts, such as str(0.1)")
    as_path(script, "script")
    name = os.fspath(script)  # as it was given: './train.py' stays so
    return Target(module=name, arguments=words) if module else Target(path=name, arguments=words)


def _done(words: Sequence[str], capture_output: bool) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, which would kill the script a quarter of a second after Ctrl-C: it has been interrupted too,
    and may have a checkpoint to save. A second Ctrl-C does kill it."""
    command = child_command("flatout", "run", *words)
    output = subprocess.PIPE if capture_output else None
    given = subprocess.DEVNULL if capture_output else None
    with subprocess.Popen(command, stdin=given, stdout=output, stderr=output, text=True, errors="replace") as process:
        try:
            try:
                stdout, stderr = process.communicate()
            except KeyboardInterrupt:
                process.communicate()
                raise
        except BaseException:
            process.kill()  # does nothing where it has ended
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _result(done: subprocess.CompletedProcess[str], document: Document | None) -> RunResult:
    known: Document = document or {}
    measured = known.get("measurement")
    peak = known.get("peak_resident_bytes")
    return RunResult(
        status=done.returncode if done.returncode >= 0 else 128 - done.returncode,
        steps=known.get("steps"),
        measurement=None if measured is None else Measurement.from_json(measured),
        peak_resident_bytes=peak,
        findings=tuple(Finding.from_json(one) for one in known.get("findings", ())),
        applied=tuple(known.get("applied", ())),
        not_applied=tuple(
            NotApplied(choice=one["label"], reason=one["reason"])
            for part in ("left_off", "rolled_back")
            for one in known.get(part, ())
        ),
        notes=tuple(known.get("plan_notes", ())),
        document=document,
        stdout=done.stdout,
        stderr=done.stderr,
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells whether a file was written anew; None: there is none."""
    if not path.is_file():  # /dev/null keeps nothing to read
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _check_module(name: str) -> None:
    """Without importing its packages, whose code is the script's."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        spec = _found(full, places) if places is not None else None
        if spec is None:
            raise UsageError(f"No module named {full}", remedy=f"looked along sys.path from {os.getcwd()}")
        places = spec.submodule_search_locations


def _found(name: str, places: Sequence[str]) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, places)
    rest = (finder.find_spec(name, places) for finder in sys.meta_path)
    return found or next((spec for spec in rest if spec is not None), None)
