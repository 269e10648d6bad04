"""The processes of a run that trained, where there are several: each by itself, and how far they are apart."""

from __future__ import annotations

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Facts, Section, Table, Text
from flatout.report.html.reading import Part, Sources
from flatout.report.html.tables import bytes_cell, heads, seconds_cell
from flatout.report.html.verdicts import PART_NAMES
from flatout.report.step_text import percent
from flatout.units import format_seconds

PARTS = ("data", "forward", "backward", "optimizer")
MOST_COLLECTIVES = 3
SPREADS = {"step": "a step", "outside_backward": "of a step outside backward, where no rank waits for another"}


def ranks(sources: Sources) -> Section | None:
    run = next((sources[kind] for kind in ("run", "profile") if sources[kind].at("processes")), None)
    if run is None:
        return None
    processes = run.parts("processes")
    numeric = ("steps", "step", *(PART_NAMES.get(name, name) for name in PARTS), "waits for ranks", "memory")
    table = Table(
        caption="Median seconds of a step, and the most memory, of each process that trained",
        heads=heads("process", *numeric, numeric=numeric),
        rows=tuple(_row(one) for one in processes),
    )
    blocks: list[Block] = [table, *_steps_side_by_side(processes), *_balance(run), *_exchanges(sources["profile"])]
    if not run.at("rank_balance"):
        blocks += _spreads(run.at("process_spread"))
    return Section(id="ranks", title="Ranks", blocks=tuple(blocks))


def _row(one: Part) -> tuple[Cell, ...]:
    parts = one.by_name("parts")
    step, exposed = one.number("step_seconds"), one.number("exposed_seconds")
    device, resident = one.number("peak_device_bytes"), one.number("peak_resident_bytes")
    said = [] if one.flag("ended") else ["not completed: it was killed, or still ran"]
    said += [fault] if (fault := one.text("fault")) else []
    return (
        Cell(text=one.text("name") or "a process", note="; ".join(said)),
        Cell(text=f"{one.number('steps') or 0:,.0f}"),
        *(seconds_cell(value) for value in (step, *(parts.get(name) for name in PARTS))),
        _waits(exposed, step),
        bytes_cell(device if device is not None else resident),
    )


def _waits(exposed: float | None, step: float | None) -> Cell:
    if exposed is None or not step:
        return seconds_cell(exposed)
    return Cell(text=f"{format_seconds(exposed)} ({percent(exposed / step)})", bar=charts.share_bar(exposed / step))


def _steps_side_by_side(processes: list[Part]) -> list[Block]:
    """A bar for each: its parts, in the same colors as those of a step."""
    rows = []
    for one in processes:
        parts = one.by_name("parts")
        parts.pop("evaluation", None)
        shown = [(name, parts[name]) for name in PART_NAMES if parts.get(name, 0.0) > 0]
        total = sum(size for _, size in shown)
        if not total:
            continue
        name = one.text("name") or "a process"
        said = ", ".join(f"{PART_NAMES[part]} {percent(size / total)}" for part, size in shown)
        bar = charts.stacked_bar([(f"part-{part}", size) for part, size in shown], f"Parts of a step of {name}: {said}")
        rows.append((Cell(text=name), Cell(text=said, chart=bar)))
    if not rows:
        return []
    return [Table(caption="A step of each process", heads=heads("process", "where a step goes"), rows=tuple(rows))]


def _balance(run: Part) -> list[Block]:
    found = run.at("rank_balance")
    excess, waited, exposed = (found.number(f"{name}_seconds") for name in ("excess", "waited", "exposed"))
    step, imbalance = found.number("step_seconds"), found.number("imbalance")
    if excess is None or waited is None or exposed is None or imbalance is None or not step:
        unknown = run.text("rank_balance_unknown_because")
        return [Text(text=f"How long ranks wait for each other: {unknown}.")] if unknown else []
    part, more = found.text("part"), found.number("part_excess_seconds") or 0.0
    rows = [
        (
            "communication that nothing overlaps",
            f"{format_seconds(exposed)} of a step ({percent(exposed / step)})",
            "as the rank waits that waits least; what others wait beyond that, they wait for that one",
        )
    ]
    if turns := found.number("turns_seconds"):
        share = f"{format_seconds(turns)} of a step ({percent(turns / step)})"
        rows.append(("ranks that are late in turns", share, "what each waits because now one is late, now another"))
    if found.flag("certain"):
        rows.append(
            (
                "the others wait for",
                f"{found.text('straggler')}: {format_seconds(excess)} of a step ({percent(excess / step)})",
                f"{format_seconds(more)} more than the others in: {PART_NAMES.get(part, part)}; the others wait "
                f"{format_seconds(waited)} longer than it does",
            )
        )
    rows.append(("imbalance", f"×{imbalance:.2f}", "the most work of its own, by the mean of all ranks"))
    return [Facts(rows=tuple(rows))]


def _exchanges(profile: Part) -> list[Block]:
    """What each rank exchanged while it was profiled."""
    rows = []
    for one in profile.parts("rank_profiles"):
        found = one.at("profile").at("communication")
        total = found.number("total_seconds")
        if total is None:
            continue
        calls = [
            f"{row.number('calls') or 0:.3g} × {row.text('name')}, {format_seconds(row.number('seconds') or 0.0)}"
            for row in found.parts("collectives")[:MOST_COLLECTIVES]
        ]
        times = (total, found.number("exposed_seconds"), found.number("overlapped_seconds"))
        rows.append((Cell(text=one.text("name")), *map(seconds_cell, times), Cell(text="; ".join(calls))))
    blocks: list[Block] = [Text(text=f"{note}.") for note in profile.texts("rank_notes")]
    if rows:
        seconds = ("in all", "exposed", "overlapped")
        named = heads("process", *seconds, "collectives", numeric=seconds)
        caption = "Communication of each rank in a profiled step; the wait for ranks that come later is in it"
        blocks.append(Table(caption=caption, heads=named, rows=tuple(rows)))
    return blocks


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
