"""What the check of a kernel found, as a screen for people and as a document for programs."""

from __future__ import annotations

from flatout.kernels.custom.result import KernelCheck, KernelProperty, KernelSpeed
from flatout.report.document import document
from flatout.statistics import Comparison
from flatout.terminal import printable
from flatout.timing import Measurement
from flatout.units import format_bytes, format_seconds, labelled

KIND = "kernel-check"
_LABEL, _VERDICT = 12, 8
_SHOWN = {"passed": "passed", "failed": "FAILED", "noted": "note", "skipped": "skipped"}


def kernel_document(found: KernelCheck) -> dict[str, object]:
    """Seconds and bytes; what is not known is null."""
    return document(KIND, found.to_json(), include_private=False)


def kernel_text(found: KernelCheck) -> str:
    """One screen: what was checked, the smallest case that fails, the time beside the reference's and the ceiling."""
    rows = [("kernel", f"{found.target} · {found.device} · torch {found.torch_version} · seed {found.seed}")]
    for one in found.properties:
        rows += labelled(one.name, _property(one))
    for speed in found.speeds:
        rows += labelled("speed", _speed(speed))
    if not found.speeds and found.speed_reason:
        rows.append(("speed", f"not timed: {found.speed_reason}"))
    rows += labelled("note", list(found.notes))
    rows.append(("verdict", f"{_verdict(found)} ({format_seconds(found.seconds)})"))
    return "\n".join(f"{label:<{_LABEL}}{printable(text)}" for label, text in rows)


def _property(one: KernelProperty) -> list[str]:
    verdict = f"{_SHOWN[one.verdict]:<{_VERDICT}} "
    if one.failure is None:
        counted = f"{one.cases} cases: " if one.cases > 1 and one.verdict == "passed" else ""
        return [f"{verdict}{counted}{one.text}"]
    margin = " " * len(verdict)
    lines = [one.failure.what]
    if one.failure.case:
        of = f"wrong in {one.failed} of {one.cases} cases, " if one.cases > 1 else ""
        smallest = "the smallest case: " if one.cases != 1 else "case: "
        lines = [f"{of}{smallest}{one.failure.case}", *lines]
    if one.failure.reproduce:
        lines.append(f"reproduce: {one.failure.reproduce}")
    return [f"{verdict}{lines[0]}", *(f"{margin}{line}" for line in lines[1:])]


def _speed(speed: KernelSpeed) -> list[str]:
    kernel = f"{format_seconds(speed.kernel.median_seconds)} ({len(speed.kernel.samples_seconds)} samples)"
    lines = [f"{speed.case}: {kernel}"]
    lines.append(f"  {_against('the reference', speed.reference, speed.against_reference)}")
    if speed.compiled is not None and speed.against_compiled is not None:
        lines.append(f"  {_against('the compiled reference', speed.compiled, speed.against_compiled)}")
    else:
        lines.append(f"  the compiled reference: unknown, because {speed.compiled_reason}")
    moved = f"{format_bytes(speed.moved_bytes)} of inputs and outputs"
    share = speed.share_of_ceiling
    if share is None or speed.ceiling_seconds is None:
        lines.append(f"  share of the ceiling: unknown, because {speed.ceiling_reason}")
    else:
        least = f"{format_seconds(speed.ceiling_seconds)} for {moved}: {speed.ceiling_reason}"
        lines.append(f"  {share:.0%} of the ceiling ({least})")
    return lines + [f"  caution: {warning}" for warning in speed.kernel.warnings]


def _against(name: str, other: Measurement, found: Comparison) -> str:
    """'x1.52 (1.49–1.55) as fast as the reference, 3 ms'."""
    interval = f"{found.low:.2f}–{found.high:.2f}" if found.has_interval else f"{found.pairs} pairs, no interval"
    verdict = "" if found.verdict != "not significant" else "; not significant"
    return f"x{found.ratio:.2f} ({interval}) as fast as {name}, {format_seconds(other.median_seconds)}{verdict}"


def _verdict(found: KernelCheck) -> str:
    looked = [one for one in found.properties if one.verdict != "skipped"]
    if found.ok:
        return f"right in {len(looked)} checks"
    return f"wrong: {', '.join(one.name for one in found.failures)}"
