"""What held a script's memory, as a screen for people and as a document for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from flatout.memory.leaks import LEAST_STEPS, Leak
from flatout.memory.savings import Saving
from flatout.memory.timeline import TensorUse
from flatout.memory.use import LineUse, MemoryUse
from flatout.report.document import document
from flatout.script.memory_trial import MemoryWatched, ProcessMemory, RankMemory
from flatout.terminal import printable
from flatout.units import counted, format_bytes, labelled

KIND = "memory"
BARS = "▁▂▃▄▅▆▇█"
LINES_SHOWN, TENSORS_SHOWN = 5, 5


def memory_document(watched: MemoryWatched, *, include_private: bool = False) -> dict[str, object]:
    """Bytes everywhere; a figure that is not known is null."""
    payload: dict[str, object] = {
        "script": {"name": watched.target.name, "arguments": list(watched.target.arguments), "status": watched.status},
        **_process_fields(watched.memory),
        "notes": _notes(watched),
    }
    if watched.ranks:
        payload["shown_rank"] = watched.shown_rank
        payload["ranks"] = [
            {"name": one.name, "fault": one.fault or None, **_process_fields(one.memory)} for one in watched.ranks
        ]
    return document(KIND, payload, include_private=include_private)


def _process_fields(memory: ProcessMemory) -> dict[str, object]:
    return {
        "steps": memory.steps,
        "step_kind": memory.step_kind,
        "use": memory.use.to_json() if memory.use is not None else None,
        "leaks": {
            "verdict": memory.verdict,
            "judged_steps": memory.judged_steps,
            "leaks": [asdict(leak) for leak in memory.leaking],
            "bounded": [asdict(leak) for leak in memory.leaks if leak.bounded],
            "waited_for_the_garbage_collector": list(memory.collected),
        },
        "resident_bytes": list(memory.resident_bytes),
        "peak_resident_bytes": memory.peak_resident_bytes,
    }


def memory_text(watched: MemoryWatched) -> str:
    rows = [("script", f"{shlex.join(watched.target.command)} · {_steps(watched)}")]
    memory = watched.memory
    use = memory.use
    rows += labelled("ranks", _rank_lines(watched.ranks))
    if use is not None:
        rows += _peak(use)
        rows += _timeline(use, memory.resident_bytes)
        rows += labelled("lines", [_line_text(one) for one in use.lines[:LINES_SHOWN]])
        rows += labelled("tensors", [_tensor_text(one) for one in use.tensors[:TENSORS_SHOWN]])
    process = f"{format_bytes(memory.peak_resident_bytes)} at most: the whole process, including Python and libraries"
    rows.append(("resident", process))
    if use is not None:
        rows += labelled("savings", [_saving_text(saving) for saving in use.savings])
    rows += labelled("leaks", [*_leak_lines(memory), *_leaks_of_others(watched)])
    rows += labelled("note", _notes(watched))
    return "\n".join(f"{label:<10}{printable(text)}" for label, text in rows)


def _steps(watched: MemoryWatched) -> str:
    memory = watched.memory
    if memory.use is None:
        return "it never imported torch"
    if not memory.steps:
        return "no training step found: this is the whole run"
    warm_up = memory.use.warm_up
    taken = f"{counted(memory.steps, 'step')}, {warm_up} of them to warm up"
    if watched.ranks:
        taken += f", in {len(watched.ranks)} processes; below is {watched.shown_rank or 'the script itself'}"
    return taken if watched.status is None else f"{taken}; the script exited on its own with code {watched.status}"


def _peak(use: MemoryUse) -> list[tuple[str, str]]:
    peak = use.peak
    parts = [f"{name} {format_bytes(size)}" for name, size in peak.categories.items() if size]
    rows = [
        ("peak", f"{format_bytes(peak.size_bytes)} of tensors on {use.device}, {_moment(use)}"),
        ("", " + ".join(parts) or "no tensor"),
    ]
    if use.between_steps_bytes is not None:
        rows.append(("held", f"{format_bytes(use.between_steps_bytes)} after the last step"))
    return rows


def _moment(use: MemoryUse) -> str:
    peak = use.peak
    when = f"in step {peak.step}, {peak.phase}" if peak.step is not None else "before the first step"
    if not use.steps:
        when = ""
    module = f"{'of' if when else 'in'} {peak.module}" if peak.module else ""
    operation = f"({peak.operation})" if peak.operation else ""
    return " ".join(part for part in (when, module, f"at {peak.line}" if peak.line else "", operation) if part)


def _timeline(use: MemoryUse, resident: Sequence[int]) -> list[tuple[str, str]]:
    if not use.steps:
        return []
    peaks, held = [step.peak_bytes for step in use.steps], [step.held_bytes for step in use.steps]
    top = max(peaks)
    rows = [
        ("steps", f"peak {_bars(peaks, top)}  {format_bytes(peaks[0])} -> {format_bytes(peaks[-1])}"),
        ("", f"held {_bars(held, top)}  {format_bytes(held[0])} -> {format_bytes(held[-1])}"),
    ]
    if resident:
        before, after = format_bytes(resident[0]), format_bytes(resident[-1])
        rows.append(("", f"     {'':{len(peaks)}}  {before} -> {after} resident: the process, not the tensors"))
    return rows


def _bars(values: Sequence[int], top: int) -> str:
    return "".join(BARS[min(len(BARS) - 1, len(BARS) * value // (top + 1))] for value in values)


def _line_text(one: LineUse) -> str:
    held = counted(one.tensors, "tensor")
    return f"{format_bytes(one.size_bytes):>9}  {one.line or 'unknown'}  {', '.join(one.categories)}, {held}"


def _tensor_text(one: TensorUse) -> str:
    shape = "×".join(str(size) for size in one.shape) or "scalar"
    where = " ".join(part for part in (one.module, one.line) if part) or one.operation
    return f"{format_bytes(one.size_bytes):>9}  {shape} {one.dtype}  {one.category}  {where}"


def _saving_text(saving: Saving) -> str:
    how = f" ({' '.join(part for part in (saving.line, saving.how) if part)})" if saving.line or saving.how else ""
    before, after = saving.peak_before_bytes, saving.peak_after_bytes
    if saving.held_bytes is None or before is None or after is None:
        return f"{saving.measure}: {saving.how}"
    word = "at most " if saving.certainty == "at most" else ""
    peak = f"peak {format_bytes(before)} -> {format_bytes(after)}" if after != before else "the peak stays"
    return f"{saving.measure}: {word}{format_bytes(saving.held_bytes)} less held, {peak}{how}"


def _rank_lines(ranks: Sequence[RankMemory]) -> list[str]:
    """A header, and a line for each process."""
    if not ranks:
        return []
    wide = max(len(one.name) for one in ranks)
    columns = ("peak of tensors", "between steps", "resident", "steps")
    lines = [" " * wide + "".join(f"{name:>17}" for name in columns)]
    for one in ranks:
        use = one.memory.use
        held = None if use is None else use.between_steps_bytes
        peak = "unknown" if use is None else format_bytes(use.peak.size_bytes)
        between = "unknown" if held is None else format_bytes(held)
        cells = (peak, between, format_bytes(one.memory.peak_resident_bytes), str(one.memory.steps))
        said = f"  (not followed to the end: {one.fault})" if one.fault else "  leaks" * bool(one.memory.leaking)
        lines.append(f"{one.name:<{wide}}" + "".join(f"{cell:>17}" for cell in cells) + said)
    return lines


def _leak_lines(memory: ProcessMemory) -> list[str]:
    if memory.use is None:
        return []
    lines = [text for leak in memory.leaking for text in _leak_text(leak)]
    if not lines and memory.verdict == "steady":
        steady = "only what is bounded grows" if memory.leaks else "what is held between steps is steady"
        lines.append(f"none: {steady} over {memory.judged_steps} steps")
    elif not lines:
        judged = counted(memory.judged_steps, "step")
        lines.append(f"unknown: {judged} after the warm-up, and {LEAST_STEPS} are needed to tell")
    lines += [f"not a leak: {_holder(leak)}: {leak.bounded}" for leak in memory.leaks if leak.bounded]
    return lines


def _leaks_of_others(watched: MemoryWatched) -> list[str]:
    """What leaks in other ranks, but not in the one that is shown."""
    shown = {(leak.holder, leak.line) for leak in watched.memory.leaking}
    lines = []
    for one in watched.ranks:
        for leak in one.memory.leaking:
            if (leak.holder, leak.line) not in shown:
                first, *rest = _leak_text(leak)
                lines += [f"{one.name}: {first}", *rest]
    return lines


def _leak_text(leak: Leak) -> list[str]:
    line = f"{leak.line}  {leak.source}" if leak.line else "the line that holds it was not found"
    growth = f"{format_bytes(leak.bytes_per_step)} of tensors a step"
    if leak.graph_nodes_per_step:
        growth += f", {leak.graph_nodes_per_step:.3g} autograd graph nodes a step"
    texts = [f"held by {_holder(leak)}: {line}", f"  {growth}"]
    if leak.births:
        more = f" and {len(leak.births) - 3} more" if len(leak.births) > 3 else ""
        texts.append(f"  made at {', '.join(leak.births[:3])}{more}")
    return texts


def _holder(leak: Leak) -> str:
    if not leak.holder:
        return "an unnamed object"
    known = [leak.type_name]
    if leak.entries is not None:
        known.append(f"{leak.entries} entries")
    if leak.entries_per_step:
        known.append(f"{leak.entries_per_step:+.3g} a step")
    return f"`{leak.holder}` ({', '.join(part for part in known if part)})"


def _notes(watched: MemoryWatched) -> list[str]:
    memory, notes = watched.memory, list(watched.rank_notes)
    if memory.compiled:
        notes.append("memory allocated by compiled code is not counted here")
    if memory.left_uncompiled:
        notes.append(
            "torch.compile compiles nothing while memory is followed: the peak is that of the uncompiled script"
        )
    if memory.collected:
        lines = ", ".join(memory.collected[:3])
        notes.append(f"only reference cycles held tensors from {lines}: Python frees them from time to time")
    return notes
