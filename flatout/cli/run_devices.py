"""flatout run --devices: the same script on several devices, and what to know of it, on stderr. And what the options
--prove and --check-deterministic compare in trials instead of a run."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, cast, get_args

from flatout import environment
from flatout.cli.command_line import on_cpu, refuse_alone, refuse_others
from flatout.errors import UsageError
from flatout.signals import signals_as_exits
from flatout.terminal import is_terminal, tell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flatout.script.deterministic_check import DeterminismCheck
    from flatout.script.entry import Target
    from flatout.script.replicas.settings import Facts, Settings

OWN = ("--devices", "--batch", "--loss")
"""Options of this kind of run that take a value."""
SWITCHES = ("--allow-local-batchnorm", "--all-ranks-write", "--prove")
MOST_NAMES = 5


def run_on_devices(target: Target, options: dict[str, str]) -> int | None:
    """Returns the exit status; None: neither options nor plan ask for such a run, or they ask for one device, which is
    a plain run."""
    planned = None if "--devices" in options else _planned(target, options)
    if "--devices" not in options and planned is None:
        refuse_alone({name: name in options for name in (*OWN, *SWITCHES)})
        return None
    from flatout.script.child_command import child_command
    from flatout.script.replicas.settings import Batch, Facts, Loss, Settings
    from flatout.script.replicas.starting import device_count, ranks_prepared, start_ranks

    if environment.rank() is not None:
        raise UsageError(
            "--devices in a process that a launcher has started",
            limit="it starts the processes of this machine itself",
            remedy="start it without torchrun, or leave --devices out",
        )
    cpu = on_cpu(options.get("--device"))
    try:
        count, visible = device_count(options.get("--devices") or str(planned), on_cpu=cpu)
    except UsageError as error:
        if planned is None:
            raise
        raise UsageError(
            f"the plan's {error.what.removeprefix('--')}",
            limit=error.limit,
            remedy=f"{error.remedy}; --without devices trains on one",
        ) from None
    settings = Settings(
        batch=cast("Batch", _one_of("--batch", options.get("--batch", "global"), get_args(Batch))),
        loss=cast("Loss | None", _one_of("--loss", options.get("--loss"), get_args(Loss))),
        allow_local_batchnorm="--allow-local-batchnorm" in options,
        isolated="--all-ranks-write" not in options,
        visible=visible,
    )
    target.check()
    if "--prove" in options:
        together = (*OWN, *SWITCHES, "--device", "--allow-network", "--no-plan", "--no-report", "--quiet")
        refuse_others("--prove", options, together)
        return _prove(target, count, settings, allow_network="--allow-network" in options)
    if count == 1:
        return None
    words: list[str] = []
    for name, value in options.items():
        if name not in OWN and name not in SWITCHES:
            words += [name, value] if value else [name]
    command = child_command("flatout", "run", *words, *target.command)
    variables = environment.deterministic_variables() if "--deterministic" in options else {}
    with ranks_prepared(settings) as folder, signals_as_exits():
        on_terminal = "--quiet" not in options and is_terminal(sys.stdout) and is_terminal(sys.stderr)
        with _panel(folder) if on_terminal and environment.terminal_has_cursor() else contextlib.nullcontext():
            status = start_ranks(command, count, folder, variables=tuple(variables.items()))
        facts = Facts.read(folder)
        told = on_terminal and _show_summary(folder)
    if facts is not None and not told and status == 0 and "--quiet" not in options:
        _say(facts, settings, planned)
    return status


@contextlib.contextmanager
def _panel(folder: Path) -> Iterator[None]:
    """The status lines: the ranks themselves have no terminal."""
    from flatout.application.live_run import ranks_panel
    from flatout.machine.detect import detect
    from flatout.report.live import Panel

    lines = ranks_panel(folder, detect().ceilings)
    panel = Panel(sys.stderr.fileno(), lines.lines)
    panel.start()
    try:
        yield
    finally:
        panel.stop()
        lines.close()


def _show_summary(folder: Path) -> bool:
    """What the first rank has to say at its end; False where it could not say it."""
    from flatout.script.replicas.settings import SUMMARY

    try:
        sys.stderr.write((folder / SUMMARY).read_text(encoding="utf-8") + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    return True


def _planned(target: Target, options: dict[str, str]) -> int | None:
    """The number of devices in the plan of this run; None: it has none that applies here."""
    from flatout.application.applied_plan import AppliedPlan

    if "--no-plan" in options or options.get("--device") not in (None, "cpu") or environment.rank() is not None:
        return None
    applied = AppliedPlan(
        target, visible_before=None, announce=lambda text: None, while_verifying=contextlib.nullcontext
    )
    applied.read(options.get("--plan"), chosen_without(options))
    if applied.plan is None or applied.plan.devices is None:
        return None
    return applied.plan.devices if "--trust-plan" in options or applied.mismatch() is None else None


def _prove(target: Target, count: int, settings: Settings, *, allow_network: bool) -> int:
    """Exit code 0: equal to rounding, or alike over several seeds; 1: different; 4: not comparable."""
    from flatout.report.devices_text import proof_text
    from flatout.script.isolation.namespaces import own_network
    from flatout.tuning.devices_proof import prove_devices

    if count == 1:
        raise UsageError("--prove with one device", limit="it is compared with several", remedy="use --devices 2")
    if not settings.isolated:
        raise UsageError("--all-ranks-write with --prove", limit="trials write none of the script's files")
    if not allow_network:
        own_network()  # of this process, and so of all trials: they reach each other alone
    try:
        with signals_as_exits():
            proof = prove_devices(target, count, settings, progress=lambda text: tell(f"flatout: {text}"))
    except KeyboardInterrupt:
        tell("interrupted")
        return 128 + signal.SIGINT
    print(proof_text(proof))
    return {"equal to rounding": 0, "alike": 0, "different": 1, "not comparable": 4}[proof.verdict]


def _say(facts: Facts, settings: Settings, planned: int | None) -> None:
    from flatout.report.devices_text import sharing_lines

    lines = [] if planned is None else [f"on {planned} devices, as the plan says (--without devices trains on one)"]
    tell(*(f"flatout: {line}" for line in (*lines, *sharing_lines(facts, settings))))


def chosen_without(options: dict[str, str]) -> list[str]:
    """The choices of the plan that are left out."""
    without = options.get("--without")
    return [name.strip() for name in without.split(",")] if without else []


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise UsageError(f"{name} is {value!r}", limit=f"it is one of {', '.join(allowed)}")
    return value


def check_deterministic(target: Target, *, allow_network: bool) -> int:
    """Of two runs as trials, compared to the bit. Exit code 0: bit-identical; 1: not."""
    from flatout.cli.streams import stdin_copy
    from flatout.script.deterministic_check import check_determinism

    try:
        with signals_as_exits(), stdin_copy() as stdin_file:
            found = check_determinism(target, stdin_file, allow_network=allow_network)
    except KeyboardInterrupt:  # its script runs in trials: the interrupt is not the script's own end
        tell("interrupted")
        return 128 + signal.SIGINT
    print(determinism_text(found))
    return 0 if found.equal else 1


def determinism_text(found: DeterminismCheck) -> str:
    if found.error is not None:
        return (
            f"not deterministic: {found.error}\n"
            f"after {found.steps} steps; replace that operation, or allow it: "
            "torch.use_deterministic_algorithms(True, warn_only=True)"
        )
    horizon = f"{found.steps} steps" if found.steps else "the end of the script"
    if not found.equal:
        more = f" and {len(found.differing) - MOST_NAMES} more" if len(found.differing) > MOST_NAMES else ""
        return f"not deterministic: after {horizon} two runs differ in {', '.join(found.differing[:MOST_NAMES])}{more}"
    cost = (
        "not known: too few steps, or times too noisy"
        if found.cost is None
        else f"x{found.cost:.2f} the time of a plain step"
    )
    return f"deterministic: after {horizon} two runs are bit-identical in {found.tensors} tensors\ncost: {cost}"
