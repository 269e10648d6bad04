"""The processes of a run that trained, where there are several: each by itself, and how far they are apart."""

from __future__ import annotations

from flatout.report.html.blocks import Block, Cell, Head, Section, Table, Text
from flatout.report.html.reading import Part
from flatout.report.html.verdicts import PART_NAMES, Sources
from flatout.units import format_bytes, format_seconds

PARTS = ("data", "forward", "backward", "optimizer")
SPREADS = {"step": "a step", "outside_backward": "of a step outside backward, where no rank waits for another"}


def ranks(sources: Sources) -> Section | None:
    run = sources.get("run")
    processes = run.parts("processes") if run is not None else []
    if run is None or not processes:
        return None
    heads = ("process", "steps", "step", *(PART_NAMES.get(name, name) for name in PARTS), "memory")
    table = Table(
        caption="Median seconds of a step, and the most memory, of each process that trained",
        heads=tuple(Head(text=text, numeric=number > 0) for number, text in enumerate(heads)),
        rows=tuple(_row(one) for one in processes),
    )
    blocks: list[Block] = [table, *_spreads(run.at("process_spread"))]
    return Section(id="ranks", title="Ranks", blocks=tuple(blocks))


def _row(one: Part) -> tuple[Cell, ...]:
    parts = one.by_name("parts")
    seconds = [one.number("step_seconds"), *(parts.get(name) for name in PARTS)]
    device, resident = one.number("peak_device_bytes"), one.number("peak_resident_bytes")
    memory = device if device is not None else resident
    said = [] if one.flag("ended") else ["not completed: it was killed, or still ran"]
    said += [fault] if (fault := one.text("fault")) else []
    return (
        Cell(text=one.text("name") or "a process", note="; ".join(said)),
        Cell(text=f"{one.number('steps') or 0:,.0f}"),
        *(Cell(text="unknown" if value is None else format_seconds(value)) for value in seconds),
        Cell(text="unknown" if memory is None else format_bytes(memory)),
    )


def _spreads(found: Part) -> list[Text]:
    texts = []
    for name, what in SPREADS.items():
        spread = found.at(name)
        slow, fast = spread.number("slowest_seconds"), spread.number("fastest_seconds")
        if slow is None or fast is None:
            continue
        slowest, fastest = spread.text("slowest"), spread.text("fastest")
        texts.append(
            Text(text=f"Slowest: {slowest}, {format_seconds(slow)} {what}; fastest: {fastest}, {format_seconds(fast)}.")
        )
    return texts
