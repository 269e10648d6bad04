"""A run in words while it goes on: the lines of the panel, and the rows that `flatout watch` and the page show."""

from __future__ import annotations

import datetime
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from flatout.diagnose.finding import Finding
from flatout.diagnose.run_energy import Energy, trained_on
from flatout.diagnose.run_state import RunState
from flatout.diagnose.seen_run import Condition, LiveRank, LiveRanks, Watched, late_seconds
from flatout.machine.ceilings import Ceilings
from flatout.machine.device_rates import Devices
from flatout.machine.nvidia_sensors import GpuReading
from flatout.machine.processes import ProcessUse
from flatout.report.step_text import PARTS, SMALLEST_SHARE_SHOWN, breakdown_text, percent, share_of_ceiling
from flatout.terminal import printable
from flatout.units import format_bytes, format_number, format_seconds

MOST_ROWS = 16
WATCH_LABEL = 10
MOST_PROCESSES = 8
"""Shown below a run."""
LABEL_CELLS = 9
PART_SHOWN_SHARE = 0.05
WORDS = {"communication": "waits"}
"""In a line that is short."""


@dataclass(frozen=True, kw_only=True)
class LiveView:
    """All that is known of a run now; None: not known."""

    state: RunState
    condition: Condition = "running"
    clock_seconds: float
    """time.monotonic() now."""
    ceilings: Ceilings | None = None
    devices: Devices | None = None
    energy: Energy | None = None
    ranks: LiveRanks = field(default_factory=LiveRanks)
    """Where several processes train."""


# the panel


def panel_lines(view: LiveView, columns: int, most: int = 3) -> list[str]:
    """At most so many lines of at most `columns` cells: progress and speed; where a step's time goes and the devices;
    what was found, if anything was; all of it in one line where there is room for only one. Where several ranks train:
    how far they are, a line for each as far as there are lines, what was found."""
    state = view.state
    if view.ranks:
        first, *rest = ranks_parts(view.ranks)
        together = _joined([f" flatout · {first}", *rest], columns)
        notice = _notice(state, columns)
        shown = rank_lines(view.ranks, most - 1 - len(notice))
        return [together, *(fitted(f" {line}", columns) for line in shown), *notice][:most]
    if not state.steps:
        return [fitted(" flatout · waiting for the first step", columns)]
    head = [f" flatout · step {state.steps:,}", *_speed(view), *_late(view)]
    if most == 1:
        memory = [format_bytes(state.resident_bytes)] if state.resident_bytes is not None else []
        return [_joined([*head, *memory, *_notices(state)], columns)]
    middle = _joined([*_short_parts(state), *_short_devices(view)], columns)
    return [_joined(head, columns), middle, *_notice(state, columns)]


def _notice(state: RunState, columns: int) -> list[str]:
    notices = _notices(state)
    if not notices:
        return []
    more = f" (and {len(notices) - 1} more)" if len(notices) > 1 else ""
    return [fitted(f" ! {notices[0]}{more}", columns)]


def _notices(state: RunState) -> list[str]:
    return [*(finding.title for finding in state.findings), *state.notes]


def _speed(view: LiveView) -> list[str]:
    state = view.state
    if not state.step_seconds:
        return []
    parts = [format_seconds(state.step_seconds), f"{1 / state.step_seconds:,.1f} steps/s"]
    if state.samples_per_step:
        parts.append(f"{format_number(state.samples_per_step / state.step_seconds)} samples/s")
    if (epoch := _epoch_text(state)) is not None:
        parts.append(epoch)
    share, of_what = share_of_ceiling(state.flops_per_step, state.step_seconds, view.ceilings, state.device)
    return parts if share is None else [*parts, f"{percent(share)} of the {of_what.partition(' (')[0]}"]


def _epoch_text(state: RunState) -> str | None:
    """None where no loader's epochs are counted."""
    epoch = state.epoch
    if epoch is None:
        return None
    if epoch.steps_total is None or epoch.steps_done > epoch.steps_total:
        return f"epoch {epoch.number}, step {epoch.steps_done:,} of it"
    left = f", {format_seconds(epoch.seconds_left)} left" if epoch.seconds_left else ""
    return f"epoch {epoch.number}, step {epoch.steps_done:,} of {epoch.steps_total:,}{left}"


def _late(view: LiveView) -> list[str]:
    """When the last step ended, where that is long ago."""
    ago = late_seconds(view.state, view.clock_seconds) if view.condition == "running" else None
    return [] if ago is None else [f"last step {format_seconds(round(ago))} ago"]


def _short_parts(state: RunState) -> list[str]:
    if not state.parts_step_seconds:
        return [" where the time goes shows after some steps"]
    shares = [(name, state.parts_seconds.get(name, 0.0) / state.parts_step_seconds) for name in PARTS]
    return [" " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share > SMALLEST_SHARE_SHOWN)]


def _short_devices(view: LiveView) -> list[str]:
    state, devices = view.state, view.devices
    parts = [format_bytes(state.resident_bytes)] if state.resident_bytes is not None else []
    if state.run_seconds:
        parts.append(f"CPU {state.cpu_seconds / state.run_seconds:.1f} cores")
    if devices is None:
        return parts
    gpu = trained_on(state, devices.reading.gpus)
    if gpu is not None:
        parts += [f"GPU {gpu.index}", *_gpu_parts(gpu)]
    elif not (state.device or "").startswith("cuda"):
        parts += _cpu_sensors(devices)
    if view.energy is not None and view.energy.joules_per_sample is not None:
        parts.append(f"{_joules(view.energy.joules_per_sample)} a sample")
    return parts


def _joined(parts: Sequence[str], columns: int) -> str:
    """Whole parts as long as they fit; the first in any case."""
    line = parts[0]
    for part in parts[1:]:
        if cells(line) + 3 + cells(part) > columns:
            break
        line += f" · {part}"
    return fitted(line, columns)


# rows


def live_rows(view: LiveView) -> list[tuple[str, str]]:
    """(label, text), without the findings."""
    state = view.state
    rows = [("script", f"{state.script} · {condition_text(view)}")]
    if not state.steps and view.ranks:
        return [*rows, *rank_rows(view.ranks), *_device_rows(view)]
    if not state.steps:
        return [*rows, ("step", "waiting for the first step"), *_device_rows(view)]
    rows.append(("progress", _progress_text(view)))
    if state.step_seconds:
        samples = state.samples_per_step
        each = f"{format_number(samples / state.step_seconds)} samples/s" if samples else ""
        why = "" if samples else f"samples/s unknown: {state.samples_unknown_because}"
        speed = [format_seconds(state.step_seconds), f"{1 / state.step_seconds:,.1f} steps/s", each or why]
        rows.append(("step", " · ".join(speed)))
    if state.parts_step_seconds:
        rows.append(("", breakdown_text(state.parts_seconds, state.parts_step_seconds)))
    share, of_what = share_of_ceiling(state.flops_per_step, state.step_seconds, view.ceilings, state.device)
    known = of_what if share is None else f"{percent(share)} of the {of_what}"
    rows.append(("ceiling", known if state.flops_per_step else f"unknown: {state.flops_unknown_because}"))
    rows.append(("memory", " · ".join(_memory_parts(state))))
    rows += rank_rows(view.ranks)
    rows += _device_rows(view)
    if view.energy is not None:
        rows.append(("energy", _energy_text(view.energy)))
    rows.append(("plan", ", ".join(state.applied) if state.applied else "none: the script runs as it is"))
    return [*rows, *(("", note) for note in state.notes)]


def condition_text(view: LiveView) -> str:
    """'running for 3 min 4 s', 'ended at 14:03:22 with status 0'."""
    state = view.state
    at = _time_of_day(state.written_at)
    took = format_seconds(state.run_seconds)
    if view.condition == "ended":
        status = "" if state.status is None else f" with status {state.status}"
        return f"ended at {at}{status}, after {took}"
    if view.condition == "killed":
        return f"its process {state.pid} is gone and wrote no end: killed after {at}, its last sign of life"
    if view.condition == "unknown":
        return f"process {state.pid} of another container; its last sign of life was at {at}"
    running = format_seconds(state.run_seconds + max(0.0, view.clock_seconds - state.written_clock))
    return f"{'stopped, ' if view.condition == 'stopped' else ''}process {state.pid}, for {running}"


def _time_of_day(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return "an unknown time"


def _progress_text(view: LiveView) -> str:
    state, epoch = view.state, view.state.epoch
    parts = [f"step {state.steps:,}"]
    if epoch is None:
        parts.append(f"epochs unknown: {state.epoch_unknown_because}")
    else:
        parts.append(_epoch_text(state) or "")
        if epoch.steps_total is None and epoch.total_unknown_because:
            parts.append(f"its length is unknown: {epoch.total_unknown_because}")
    return " · ".join([*parts, *_late(view)])


def _memory_parts(state: RunState) -> list[str]:
    parts = [f"{format_bytes(state.resident_bytes)} resident"] if state.resident_bytes is not None else []
    if state.tensors_peak_bytes is not None and state.tensors_held_bytes is not None:
        peak, held = format_bytes(state.tensors_peak_bytes), format_bytes(state.tensors_held_bytes)
        parts.append(f"tensors {peak} at most, {held} between steps")
    if state.reserved_bytes is not None:
        parts.append(f"{format_bytes(state.reserved_bytes)} reserved by the GPU's allocator")
    return parts or ["not known yet"]


def _device_rows(view: LiveView) -> list[tuple[str, str]]:
    state = view.state
    own = []
    if state.steps and state.run_seconds:  # of a process that only starts others no state follows the first
        own = [f"{state.cpu_seconds / state.run_seconds:.1f} cores busy with this run"]
    if view.devices is None:
        return [("CPU", " · ".join(own))] if own else []
    rows = [("CPU", " · ".join([*own, *cpu_parts(view.devices)]))]
    gpus = view.devices.reading.gpus
    trains = trained_on(state, gpus)
    shown = (trains,) if trains is not None else gpus
    return rows + [_gpu_row(gpu) for gpu in shown]


# ranks: those in trouble first where there is no room for all


def ranks_parts(found: LiveRanks) -> list[str]:
    """'2 ranks', 'step 1,234', ...: of all together."""
    ranks = found.ranks
    steps = [one.record.steps for one in ranks]
    counted = f"step {max(steps):,}" if min(steps) == max(steps) else f"steps {min(steps):,} to {max(steps):,}"
    parts = [f"{len(ranks)} rank{'s' * (len(ranks) > 1)}", counted]
    if seconds := [one.record.recent_seconds for one in ranks if one.record.recent_seconds]:
        parts.append(f"{format_seconds(max(seconds))} a step")
    parts += [f"{count} {what}" for what, count in _troubles(ranks)]
    balance = found.balance
    if balance is not None and balance.step_seconds:
        parts.append(f"communication exposed {percent(balance.exposed_seconds / balance.step_seconds)}")
    return parts


def _troubles(ranks: Sequence[LiveRank]) -> list[tuple[str, int]]:
    gone = sum(one.condition == "killed" for one in ranks)
    silent = sum(one.silent_seconds is not None for one in ranks)
    return [(what, count) for what, count in (("gone", gone), ("silent", silent)) if count]


def rank_lines(found: LiveRanks, most: int) -> list[str]:
    """At most so many; where one is too few for all, the last says how many are not shown."""
    if most < 1:
        return []
    ranks = list(found.ranks)
    left = max(0, len(ranks) - most)
    if left:
        worst = sorted(ranks, key=_calm)[: most - 1]
        left = len(ranks) - len(worst)
        ranks = [one for one in ranks if one in worst]
    wide = max((len(one.name) for one in ranks), default=0)
    lines = [f"{one.name:<{wide}}  {' · '.join(_rank_parts(one))}" for one in ranks]
    return [*lines, f"and {left} more"] if left else lines


def rank_rows(found: LiveRanks) -> list[tuple[str, str]]:
    """(label, text), for a page or `flatout watch`."""
    if not found:
        return []
    rows = [("ranks", " · ".join(ranks_parts(found)))]
    ranks = sorted(found.ranks, key=_calm)[:MOST_ROWS]
    for one in (one for one in found.ranks if one in ranks):
        short = len(one.name) <= LABEL_CELLS
        rows.append(
            (one.name if short else "", " · ".join(_rank_parts(one) if short else [one.name, *_rank_parts(one)]))
        )
    left = len(found.ranks) - len(ranks)
    return [*rows, ("", f"and {left} more")] if left else rows


def _calm(one: LiveRank) -> tuple[bool, bool, bool]:
    """Sorts those in trouble first."""
    return one.condition != "killed", one.silent_seconds is None, one.holds_up_seconds is None


def _rank_parts(one: LiveRank) -> list[str]:
    """What is wrong with it stands first: a line may be cut."""
    record = one.record
    seconds = record.recent_seconds or record.step_seconds
    memory = record.peak_device_bytes if record.peak_device_bytes is not None else record.peak_resident_bytes
    parts = _rank_troubles(one)
    parts.append(f"step {record.steps:,}")
    parts += [format_seconds(seconds)] if seconds else []
    parts += [shares] if (shares := _rank_shares(one)) else []
    return [*parts, format_bytes(memory)]


def _rank_troubles(one: LiveRank) -> list[str]:
    said = []
    if one.condition == "killed":
        said.append("GONE: its process died unexpectedly")
    elif one.condition in ("ended", "stopped"):
        said.append(one.condition)
    if one.silent_seconds is not None:
        said.append(f"SILENT: last step {format_seconds(round(one.silent_seconds))} ago")
    if one.holds_up_seconds is not None:
        said.append(f"the others wait {format_seconds(one.holds_up_seconds)} of each step for it")
    if one.record.fault is not None:
        said.append(one.record.fault)
    return said


def _rank_shares(one: LiveRank) -> str:
    parts = {name: seconds for name, seconds in one.record.parts.items() if name != "evaluation"}
    total = sum(parts.values())
    if not total:
        return ""
    shown = [(name, parts.get(name, 0.0) / total) for name in PARTS]
    return ", ".join(f"{WORDS.get(name, name)} {share:.0%}" for name, share in shown if share > PART_SHOWN_SHARE)


# devices


def devices_rows(devices: Devices) -> list[tuple[str, str]]:
    """The machine, whoever uses it: processors, each GPU and its processes."""
    rows = [("CPU", " · ".join(cpu_parts(devices)))]
    reading = devices.reading
    if not reading.gpus:
        rows.append(("GPU", reading.no_gpu_because or "none"))
    for gpu in reading.gpus:
        rows.append(_gpu_row(gpu))
        for one in gpu.processes or ():
            memory = format_bytes(one.memory_bytes) if one.memory_bytes is not None else "memory unknown"
            rows.append(("", f"process {one.pid} {one.name or '(of another user or container)'}: {memory}"))
    return rows


def cpu_parts(devices: Devices) -> list[str]:
    """Of the whole machine, with what is unknown and why."""
    cpu = devices.reading.cpu
    parts = []
    if devices.cpu_busy_share is not None:
        parts.append(f"{devices.cpu_busy_share:.0%} of all cores busy")
    if cpu.memory_used_bytes is not None and cpu.memory_total_bytes is not None:
        parts.append(f"{format_bytes(cpu.memory_used_bytes)} of {format_bytes(cpu.memory_total_bytes)} of memory used")
    parts += _cpu_sensors(devices)
    missing = {"frequency_hz": "clock", "temperature_celsius": "temperature", "energy_joules": "power"}
    reasons: dict[str, list[str]] = {}
    for name, called in missing.items():
        if name in cpu.unknown:
            reasons.setdefault(cpu.unknown[name], []).append(called)
    return parts + [f"{', '.join(names)} unknown: {why}" for why, names in reasons.items()]


def _cpu_sensors(devices: Devices) -> list[str]:
    cpu = devices.reading.cpu
    parts = [_hertz(cpu.frequency_hz)] if cpu.frequency_hz is not None else []
    if cpu.temperature_celsius is not None:
        parts.append(f"{cpu.temperature_celsius:.0f} °C")
    if devices.cpu_watts is not None:
        parts.append(f"{devices.cpu_watts:.0f} W")
    return parts + (["throttled by temperature"] if devices.cpu_throttled else [])


def _gpu_parts(gpu: GpuReading) -> list[str]:
    parts = [f"{gpu.busy_share:.0%} busy"] if gpu.busy_share is not None else []
    if gpu.clock_hz is not None:
        most = f" of {_hertz(gpu.highest_clock_hz)}" if gpu.highest_clock_hz is not None else ""
        parts.append(f"{_hertz(gpu.clock_hz)}{most}")
    if gpu.power_watts is not None:
        limit = f" of {gpu.power_limit_watts:.0f}" if gpu.power_limit_watts is not None else ""
        parts.append(f"{gpu.power_watts:.0f}{limit} W")
    if gpu.temperature_celsius is not None:
        parts.append(f"{gpu.temperature_celsius:.0f} °C")
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes is not None:
        parts.append(f"{format_bytes(gpu.memory_used_bytes)} of {format_bytes(gpu.memory_total_bytes)}")
    return parts + ([f"held back by: {', '.join(gpu.throttled)}"] if gpu.throttled else [])


def _gpu_row(gpu: GpuReading) -> tuple[str, str]:
    shown = {
        "busy_share": "use",
        "clock_hz": "clock",
        "power_watts": "power",
        "temperature_celsius": "temperature",
        "memory_used_bytes": "memory",
        "throttled": "throttling",
    }
    unknown = [f"{called} unknown: {gpu.unknown[name]}" for name, called in shown.items() if name in gpu.unknown]
    return f"GPU {gpu.index}", " · ".join([gpu.name, *_gpu_parts(gpu), *unknown])


def _energy_text(energy: Energy) -> str:
    if energy.joules_per_step is None:
        return f"unknown: {energy.unknown_because}"
    parts = [f"{_joules(energy.joules_per_step)} a step"]
    if energy.joules_per_sample is not None:
        parts.insert(0, f"{_joules(energy.joules_per_sample)} a sample")
    else:
        parts.append(f"a sample unknown: {energy.unknown_because}")
    return " · ".join([*parts, f"of {energy.of_what} as a whole, whoever used it"])


def finding_lines(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    rows = []
    for finding in findings:
        rows.append(("finding", f"{finding.title} ({finding.evidence})"))
        rows.append(("", finding.remedy + (f": {finding.next_command}" if finding.next_command else "")))
    return rows


# flatout watch


def watched_text(found: Watched, columns: int | None = None) -> str:
    """One run in full, or a line for each; then the devices. columns: lines are broken there; None: not at all."""
    rows = _one_run(found) if found.single else _all_runs(found)
    return "\n".join(line for label, text in rows for line in _broken(label, text, columns))


def _one_run(found: Watched) -> list[tuple[str, str]]:
    (seen,) = found.runs
    view = LiveView(
        state=seen.state,
        condition=seen.condition,
        clock_seconds=found.clock_seconds,
        ceilings=found.ceilings,
        devices=found.devices if seen.condition in ("running", "stopped") else None,
        energy=found.energy if seen.condition == "running" else None,
        ranks=found.ranks,
    )
    return [*live_rows(view), *_processes(found.processes), *finding_lines(seen.state.findings)]


def _processes(processes: Sequence[ProcessUse]) -> list[tuple[str, str]]:
    """Those below the run, the largest first."""
    if not processes:
        return []
    order = sorted(processes, key=lambda one: one.resident_bytes, reverse=True)
    rows = [
        (
            "processes",
            f"{len(order)} below it" + (f"; the {MOST_PROCESSES} largest:" if len(order) > MOST_PROCESSES else ""),
        )
    ]
    for one in order[:MOST_PROCESSES]:
        cpu = format_seconds(one.cpu_seconds)
        rows.append(
            ("", f"process {one.pid} {one.name}: {format_bytes(one.resident_bytes)} resident, {cpu} of CPU time")
        )
    return rows


def _all_runs(found: Watched) -> list[tuple[str, str]]:
    rows = []
    for seen in found.runs:
        state = seen.state
        view = LiveView(state=state, condition=seen.condition, clock_seconds=found.clock_seconds)
        steps = f"step {state.steps:,}" if state.steps else "no step yet"
        speed = f"{format_seconds(state.step_seconds)} a step" if state.step_seconds else ""
        rows.append(("run", " · ".join(filter(None, (state.script, condition_text(view), steps, speed)))))
    if found.runs_unknown_because is not None:
        rows.append(("runs", f"unknown: {found.runs_unknown_because}"))
    elif not rows:
        rows.append(("runs", "none: flatout run is not running here, and no run has ended within the last hour"))
    elif any(seen.condition in ("running", "stopped") for seen in found.runs):
        rows.append(("", "to follow one: flatout watch PID"))
    return [*rows, *devices_rows(found.devices)]


def _broken(label: str, text: str, columns: int | None) -> Sequence[str]:
    text = printable(text)
    if columns is None:
        return [f"{label:<{WATCH_LABEL}}{text}"]
    width = max(20, columns - WATCH_LABEL - 1)
    pieces = textwrap.wrap(text, width) or [""]
    return [f"{label if place == 0 else '':<{WATCH_LABEL}}{piece}" for place, piece in enumerate(pieces)]


# text


def fitted(text: str, columns: int) -> str:
    """Printable, and cut to so many cells of a terminal; wide letters take two."""
    text, width = printable(text), 0
    for place, letter in enumerate(text):
        width += _width(letter)
        if width > columns:
            return text[:place]
    return text


def cells(text: str) -> int:
    """How wide a text is on a terminal."""
    return sum(map(_width, text))


def _width(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _hertz(value: float) -> str:
    return f"{value / 1e9:.2f} GHz"


def _joules(value: float) -> str:
    for below, scale, unit in ((1e-3, 1e6, "µJ"), (1.0, 1e3, "mJ"), (1e3, 1.0, "J")):
        if value < below:
            return f"{value * scale:.3g} {unit}"
    return f"{value / 1e3:.3g} kJ"
