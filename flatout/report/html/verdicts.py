"""The first sentence of the report: what was found, of each document, the most telling first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flatout.notebook_tables import table_html
from flatout.report.html.blocks import Verdict
from flatout.report.html.reading import Part
from flatout.report.step_text import percent, training_elsewhere
from flatout.statistics import median
from flatout.units import counted, format_bytes, format_number, format_seconds

PART_NAMES = {
    "data": "waiting for data",
    "transfer": "copies to the device",
    "copies": "copies",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
    "sync": "waiting for the device",
    "idle": "idle",
    "evaluation": "evaluation",
    "other": "everything else in the loop",
}
"""Parts of a step, in the order in which they are shown; also classes in the style sheet."""


def verdict(sources: Mapping[str, Part]) -> Verdict:
    """`sources` has at least one document."""
    makers = {
        "tune": _of_tune,
        "strategies": _of_strategies,
        "run": _of_run,
        "profile": _of_profile,
        "memory": _of_memory,
    }
    found = {kind: make(sources[kind]) for kind, make in makers.items() if kind in sources}
    (_, first), *others = found.items()
    lines = list(first.lines)
    for kind, one in others:
        of_step = [said for name, said in one.lines if name == "step"]
        lines.append((kind, "; ".join([", ".join(filter(None, (one.headline, one.detail))), *of_step])))
        lines += [line for line in one.lines if line[0] != "step"]
    return Verdict(
        headline=first.headline,
        tone=first.tone,
        detail=first.detail,
        lines=tuple(lines),
        cautions=tuple(caution for kind, doc in sources.items() for caution in _cautions(kind, doc)),
    )


def _cautions(kind: str, doc: Part) -> list[str]:
    """Of the document's own warnings; those of a tune's measurement are in its interval."""
    found = [*doc.texts("warnings"), *doc.texts("plan_notes")]
    found += doc.at("measurement").texts("warnings") if kind == "run" else []
    return [f"{kind}: {one}" for one in dict.fromkeys(found)]


def _of_tune(doc: Part) -> Verdict:
    one, devices = _on_one_device(doc), doc.at("devices")
    chosen, proof = devices.number("chosen"), devices.at("proof")
    if chosen is None:
        return one
    if chosen == 1:
        return replace(one, lines=(*one.lines, ("devices", devices.text("reason"))))
    headline, detail, _ = _speed(devices.at("comparison"), devices)
    lines = [("on one device", ", ".join(filter(None, (one.headline, one.detail)))), *one.lines]
    lines.append((f"on {chosen:.0f} devices", proof_line(proof)))
    return Verdict(headline=f"{headline} on {chosen:.0f} devices", tone="good", detail=detail, lines=tuple(lines))


def _of_strategies(doc: Part) -> Verdict:
    """Of a choice of parallel strategies."""
    chosen, compared, ranks = doc.text("chosen"), doc.at("comparison"), doc.number("ranks") or 0
    facts, step = doc.at("facts"), doc.at("facts").number("step_seconds")
    trained = f"{facts.text('model') or 'a model'} with {format_number(facts.number('parameters') or 0)} parameters"
    lines = [("trained", trained)]
    if not chosen:
        reason = doc.text("reason") or "no strategy was faster than one process"
        detail = f"A step of one process takes {format_seconds(step)}" if step else ""
        return Verdict(headline=_sentence(reason), tone="", detail=detail, lines=tuple(lines))
    proof = doc.at("proof")
    if proof:
        steps = f" over {proof.number('steps') or 0:.0f} steps"
        lines.append(("numbers", f"{proof.text('verdict')}{steps}"))
    on = f"{chosen} on {ranks:.0f} ranks"
    if compared.number("ratio") is None:
        return Verdict(headline=_sentence(on), tone="", detail="One process does not fit", lines=tuple(lines))
    headline, detail, tone = _speed(compared, doc, "step_seconds")
    return Verdict(headline=f"{headline} with {on}", tone=tone, detail=detail, lines=tuple(lines))


def _on_one_device(doc: Part) -> Verdict:
    speed, fit = doc.at("speedup"), doc.at("fit")
    lines = []
    if fit:
        lines.append(("memory", _fit(fit)))
    if len(peaks := doc.at("final").numbers("peak_resident_bytes")) == 2:
        lines.append(("memory", f"peak of the process {format_bytes(peaks[0])} → {format_bytes(peaks[1])}"))
    if numbers := proof_line(doc.at("proof")):
        lines.append(("numbers", numbers))
    lines += [("whole run", text) for text in [_whole_run(doc.at("whole_run"))] if text]
    if not speed or speed.number("ratio") is None:
        step = doc.at("observed").number("step_seconds")
        share = doc.number("ceiling_share_before")
        known = [f"A step takes {format_seconds(step)}"] if step else []
        known += [f"{percent(share)} of the {doc.text('ceiling')}"] if share is not None and doc.text("ceiling") else []
        headline = _sentence(doc.text("reason") or "no speedup was measured")
        return Verdict(headline=headline, tone="", detail=", ".join(known), lines=tuple(lines))
    headline, detail, tone = _speed(speed, doc.at("final"))
    return Verdict(headline=headline, tone=tone, detail=detail, lines=tuple(lines))


def _speed(speed: Part, times: Part, after_key: str = "candidate_seconds") -> tuple[str, str, str]:
    """(headline, what it rests on, tone) of a comparison; times: has the seconds of both sides."""
    ratio, low, high = (speed.number(key) for key in ("ratio", "low", "high"))
    before, after = times.number("baseline_seconds"), times.number(after_key)
    steps = f"{format_seconds(before)} → {format_seconds(after)} a step" if before and after else ""
    interval = f"95 % interval ×{low:.2f} to ×{high:.2f}" if low and high else "too few pairs for an interval"
    counted = f"{pairs:.0f} pairs" if (pairs := speed.number("pairs")) else ""
    detail = ", ".join(part for part in (steps, interval, counted) if part)
    if speed.text("verdict") == "faster":
        return f"{ratio or 1.0:.2f} times as fast", detail, "good"
    return f"{_sentence(speed.text('verdict') or 'undecided')}: ×{ratio or 1.0:.2f}", detail, ""


def proof_line(proof: Part) -> str:
    """'within rounding over 40 steps'; '' where nothing was proved."""
    steps, epochs = proof.number("steps"), proof.number("epochs")
    if not proof:
        return ""
    horizon = f" over {steps:.0f} steps" if steps is not None else ""
    passes = f", {epochs:.2g} epochs" if epochs is not None else ""
    return f"{proof.text('verdict')}{horizon}{passes}"


def _fit(fit: Part) -> str:
    limit, plain, planned = (fit.number(key) for key in ("limit_bytes", "plain_bytes", "planned_bytes"))
    if limit is None or plain is None:
        return "unknown"
    if planned is None:
        return f"a step's tensors took {format_bytes(plain)}; with the plan they were not measured"
    within = "within" if fit.flag("holds") else "not within"
    return f"a step's tensors take {format_bytes(plain)} → {format_bytes(planned)}, {within} {format_bytes(limit)}"


def _whole_run(whole: Part) -> str:
    steps, plain, planned = whole.number("steps"), whole.number("plain_seconds"), whole.number("planned_seconds")
    payoff = whole.number("payoff_steps")
    if steps and plain and planned:
        times = f"{format_seconds(plain)} → {format_seconds(planned)}"
        return f"×{plain / planned:.2f} over {steps:,.0f} steps, start-up included ({times})"
    return f"start-up is earned back after {counted(round(payoff), 'step')}" if payoff else ""


def _of_run(doc: Part) -> Verdict:
    death, status, steps = doc.at("out_of_memory"), doc.at("script").number("status"), doc.number("steps")
    seen, samples = doc.at("observed"), doc.at("measurement").numbers("samples_seconds")
    watched = seen.number("step_seconds")
    seconds = median(samples) if samples else watched
    counted = f"{steps:,.0f} step{'' if steps == 1 else 's'}" if steps else "no training step was found"
    if not steps and (processes := doc.parts("processes")):
        counted = training_elsewhere(len(processes))
        seconds = max((one.number("step_seconds") or 0.0 for one in processes), default=None)
    wall = doc.number("wall_seconds")
    detail = ", ".join([counted, *([f"{format_seconds(wall)} in all"] if wall else [])])
    if status is None:
        detail += "; the script was still running when this was written"
    lines = [("step", text) for text in [largest_part(seen.by_name("breakdown_seconds"), watched)] if text]
    if death:
        headline, tone = f"Ran out of memory at {death.text('line') or 'an unknown line'}", "bad"
    elif status:
        headline, tone = f"The script ended with exit code {status:.0f}", "bad"
    elif seconds:
        headline, tone = f"{format_seconds(seconds)} a step", ""
    else:
        headline, tone = _sentence(counted), ""
    return Verdict(headline=headline, tone=tone, detail=detail, lines=tuple(lines))


def largest_part(parts: Mapping[str, float], seconds: float | None) -> str:
    """'forward takes the most: 43% of a step'."""
    known = {name: size for name, size in parts.items() if size > 0}
    if not known or not seconds:
        return ""
    name = max(known, key=lambda one: known[one])
    called = PART_NAMES.get(name, name)
    return f"{called} takes the most: {format_seconds(known[name])} of {format_seconds(seconds)}"


def _of_profile(doc: Part) -> Verdict:
    profile = doc.at("profile")
    seconds = profile.number("step_seconds") or profile.number("profiled_step_seconds")
    steps, plain, slowed = (profile.number(key) for key in ("steps", "step_seconds", "profiled_step_seconds"))
    known = [f"{steps:.0f} steps profiled"] if steps else []
    if plain and slowed:
        known.append(f"×{slowed / plain:.2f} as long while profiled")
    headline = f"{format_seconds(seconds)} a step" if seconds else "No step was timed"
    lines = [("step", text) for text in [largest_part(profile.by_name("parts"), seconds)] if text]
    return Verdict(headline=headline, tone="", detail=", ".join(known), lines=tuple(lines))


def _of_memory(doc: Part) -> Verdict:
    peak, leaks = doc.at("use").at("peak"), doc.at("leaks")
    size, step = peak.number("size_bytes"), peak.number("step")
    resident = doc.number("peak_resident_bytes")
    if size is None:
        headline, detail = "No tensor was seen", ""
    else:
        headline = f"{format_bytes(size)} of tensors at the peak"
        when = [
            ", ".join(filter(None, (f"in step {step:.0f}" if step else "", peak.text("phase")))),
            peak.text("line") and f"at {peak.text('line')}",
        ]
        detail = " ".join(part for part in when if part)
    lines = [("process", f"{format_bytes(resident)} at most, Python and libraries included")] if resident else []
    others = [one.text("name") for one in doc.parts("ranks") if one.at("leaks").text("verdict") == "leaks"]
    leaking = leaks.text("verdict") == "leaks" or bool(others)
    growth = sum(one.number("bytes_per_step") or 0.0 for one in leaks.parts("leaks"))
    said = {"leaks": f"{format_bytes(growth)} more is held after each step", "steady": "none: memory is steady"}
    in_others = f"in {', '.join(others)}" if others and leaks.text("verdict") != "leaks" else ""
    lines.append(("leaks", in_others or said.get(leaks.text("verdict"), "unknown: too few steps to tell")))
    return Verdict(headline=headline, tone="bad" if leaking else "", detail=detail, lines=tuple(lines))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdict_html(kind: str, payload: Mapping[str, object], rows: tuple[tuple[str, str], ...] = ()) -> str:
    """As a notebook shows it: of what a document of that kind holds, and `rows` after it."""
    found = verdict({kind: Part(payload, kind)})
    detail = (("", found.detail),) if found.detail else ()
    return table_html(found.headline, (*detail, *found.lines, *rows))
