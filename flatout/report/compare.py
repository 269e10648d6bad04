"""Two results side by side: faster, slower or not significant; and a refusal where the two cannot be compared.

The runs were made apart, so a drift of the machine between them is in the ratio, and no arithmetic takes it out: it is
said beside every verdict. (`flatout tune` measures in turns for that reason.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flatout.errors import UsageError
from flatout.report.document import Document
from flatout.statistics import Comparison, compare_unpaired
from flatout.timing import Measurement
from flatout.units import format_bytes, format_seconds

_RERUN = "run both on the same machine"


@dataclass(frozen=True, kw_only=True)
class DocumentComparison:
    """The first is the baseline. `caveats` is what the figures cannot show."""

    baseline: Measurement
    candidate: Measurement
    comparison: Comparison
    machine_fingerprint: str
    caveats: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "baseline": self.baseline.to_json(),
            "candidate": self.candidate.to_json(),
            "comparison": self.comparison.to_json(),
            "machine": {"fingerprint": self.machine_fingerprint},
            "caveats": list(self.caveats),
        }


def compare_documents(a: Document, b: Document) -> DocumentComparison:
    """b against a. UsageError if a measurement is missing or the machines differ."""
    baseline, candidate = _measurement(a, "first"), _measurement(b, "second")
    machines = _machine(a, "first"), _machine(b, "second")
    if machines[0]["fingerprint"] != machines[1]["fingerprint"]:
        raise UsageError(
            "the two results are from different machines",
            limit="; ".join(machine_differences(*machines)),
            remedy=_RERUN,
        )
    comparison = compare_unpaired(baseline.samples_seconds, candidate.samples_seconds)
    contended = [which for which, m in (("first", baseline), ("second", candidate)) if m.contended]
    if contended:
        comparison = replace(
            comparison,
            verdict="not significant",
            reason=f"others competed for the processor in the {' and the '.join(contended)}: "
            "measure again on an idle machine",
        )
    caveats = ["measured separately: the ratio includes any drift of the machine between the two runs"]
    torches = [(machine.get("versions") or {}).get("torch") for machine in machines]
    if torches[0] != torches[1]:
        caveats.append(f"torch differs: {torches[0]} and {torches[1]}")
    for which, found in (("first", baseline), ("second", candidate)):
        caveats += [f"{which}: {warning}" for warning in found.warnings]
    return DocumentComparison(
        baseline=baseline,
        candidate=candidate,
        comparison=comparison,
        machine_fingerprint=machines[0]["fingerprint"],
        caveats=tuple(caveats),
    )


def machine_differences(a: Document, b: Document) -> list[str]:
    """In words; the fingerprints if the documents hold nothing more."""
    aspects: dict[str, Callable[[Document], object]] = {
        "processor": lambda m: m["cpu"]["name"],
        "cores": lambda m: m["cpu"]["available_cores"],
        "memory": lambda m: format_bytes(m["memory_total_bytes"]),
        "GPUs": lambda m: ", ".join(gpu["name"] for gpu in m["devices"]) or "none",
    }
    found = []
    if all({"cpu", "devices", "memory_total_bytes"} <= m.keys() for m in (a, b)):
        seen = {name: (str(aspect(a)), str(aspect(b))) for name, aspect in aspects.items()}
        found = [f"{name}: {left} and {right}" for name, (left, right) in seen.items() if left != right]
    return found or [f"fingerprints {a['fingerprint']} and {b['fingerprint']}"]


def _measurement(doc: Document, which: str) -> Measurement:
    data = doc.get("measurement")
    if data is None:
        kind = doc.get("flatout", {}).get("document")
        raise UsageError(
            f"the {which} document (a {kind!r}) holds no measurement", remedy="pass what `flatout run` wrote"
        )
    try:
        return Measurement.from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the {which} document's measurement is malformed ({error!r})") from error


def _machine(doc: Document, which: str) -> Document:
    machine = doc.get("machine")
    if not isinstance(machine, dict) or not isinstance(machine.get("fingerprint"), str):
        raise UsageError(f"the {which} document does not say on which machine it was measured", remedy=_RERUN)
    return machine


def comparison_text(found: DocumentComparison) -> str:
    """For people: the verdict first, then what it rests on."""
    c = found.comparison
    reason = f" ({c.reason})" if c.reason else ""
    lines = [
        f"verdict    {c.verdict}{reason}",
        f"ratio      x{c.ratio:.3f}, {_interval(c)}",
    ]
    for label, m in (("first", found.baseline), ("second", found.candidate)):
        spread = f"middle half within {format_seconds(m.iqr_seconds)}, n = {len(m.samples_seconds)}"
        lines.append(f"{label:<10} {m.name}: {format_seconds(m.median_seconds)} a step, {spread}")
    lines += [f"{'caveat' if i == 0 else '':<10} {caveat}" for i, caveat in enumerate(found.caveats)]
    return "\n".join(lines)


def _interval(found: Comparison) -> str:
    if not found.has_interval:
        return f"{found.pairs} samples, too few for an interval"
    return f"{found.confidence:.0%} interval x{found.low:.3f} to x{found.high:.3f}"
