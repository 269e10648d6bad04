"""Two results side by side: faster, slower or not significant; and a refusal where the two cannot be compared.

The runs were made apart, so a drift of the machine between them is in the ratio, and no arithmetic takes it out: it is
said beside every verdict. (`flatout tune` measures in turns for that reason.) Several runs of each side show how much
runs differ: a run is then one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from flatout.decoding import decode
from flatout.errors import MachinesDiffer, UsageError
from flatout.private_details import arguments_digest
from flatout.report.document import Document
from flatout.statistics import Comparison, compare_runs, compare_unpaired
from flatout.terminal import printable
from flatout.timing import Measurement
from flatout.units import counted, format_bytes, format_seconds

_MEASURED = {one.name for one in fields(Measurement)}
"""A later version may write more."""
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-12, 1e12
"""Of a step: what lies beyond was not measured, and its ratios overflow."""
SAME_BATCH = 1.02
"""The last batch of an epoch makes means differ a little."""
_RERUN = "run both on the same machine"
_ALONE = "measured separately: the ratio includes any drift of the machine between the two runs"
_IN_TURNS = (
    "each run is one sample: runs of both sides taken in turns put the machine's drift into the interval, "
    "one side after the other into the ratio"
)


@dataclass(frozen=True, kw_only=True)
class DocumentComparison:
    """`unit`: what counts as one sample: steps where there is one run of each side, else runs, by their medians.
    `contended`: the runs during which others competed for the processor. `caveats` is what the figures cannot show.
    `scripts`: the names of the scripts, one where all runs are of the same."""

    name: str  # of the candidate's script, or '' where its document has none
    unit: Literal["steps", "runs"]
    baseline: tuple[Measurement, ...]
    candidate: tuple[Measurement, ...]
    comparison: Comparison
    machine_fingerprint: str
    contended: tuple[str, ...]
    caveats: tuple[str, ...]
    scripts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "baseline": [one.to_json() for one in self.baseline],
            "candidate": [one.to_json() for one in self.candidate],
            "comparison": self.comparison.to_json(),
            "machine": {"fingerprint": self.machine_fingerprint},
            "contended": list(self.contended),
            "caveats": list(self.caveats),
            "scripts": list(self.scripts),
        }


def compare_sides(a: Sequence[Document], b: Sequence[Document]) -> DocumentComparison:
    """Runs of b against runs of a. UsageError if a measurement is missing, MachinesDiffer if the machines differ."""
    named = [*_named(a, "first"), *_named(b, "second")]
    measured = {which: _measurement(doc, which) for which, doc in named}
    machines = {which: _machine(doc, which) for which, doc in named}
    baseline, candidate = (
        tuple(measured[which] for which, _ in _named(*side)) for side in ((a, "first"), (b, "second"))
    )
    _check_machines(machines)
    unit: Literal["steps", "runs"] = "steps" if len(a) == len(b) == 1 else "runs"
    for label, side in (("first", baseline), ("second", candidate)):
        if len({one.samples_seconds for one in side}) < len(side):
            raise UsageError(f"two results of the {label} side are the same run", remedy="pass each run once")
    if unit == "steps":
        comparison = compare_unpaired(baseline[0].samples_seconds, candidate[0].samples_seconds)
    else:
        comparison = compare_runs(*([one.samples_seconds for one in side] for side in (baseline, candidate)))
    contended = tuple(which for which, found in measured.items() if found.contended)
    if contended:
        comparison = replace(comparison, verdict="not significant", reason=_contended_text(contended, len(measured)))
    caveats = [_ALONE if unit == "steps" else _IN_TURNS]
    if {one.samples_seconds for one in baseline} & {one.samples_seconds for one in candidate}:
        caveats.append("a run is on both sides: it was compared with itself")
    scripts = [script_name(doc) or None for _, doc in named]
    caveats += _difference("the script", scripts)
    caveats += ["the script's arguments differ"] if len({_arguments(doc) for _, doc in named} - {None}) > 1 else []
    caveats += _batches([_samples(doc) for _, doc in named])
    caveats += _difference("the device", [_text(doc, "observed", "device") for _, doc in named])
    caveats += _difference("torch", [_text(one, "versions", "torch") for one in machines.values()])
    caveats += _warnings({which: [*measured[which].warnings, *_ending(doc)] for which, doc in named})
    return DocumentComparison(
        name=script_name(b[-1]),
        unit=unit,
        baseline=baseline,
        candidate=candidate,
        comparison=comparison,
        machine_fingerprint=next(iter(machines.values()))["fingerprint"],
        contended=contended,
        caveats=tuple(caveats),
        scripts=tuple(dict.fromkeys(name for name in scripts if name is not None)),
    )


def _named(documents: Sequence[Document], which: str) -> list[tuple[str, Document]]:
    """With what a message calls each: 'first', or 'first (run 2)' where a side has several."""
    if len(documents) == 1:
        return [(which, documents[0])]
    return [(f"{which} (run {number})", doc) for number, doc in enumerate(documents, 1)]


def _warnings(said: Mapping[str, Sequence[str]]) -> list[str]:
    """In full of one run of each side; of more, how many runs have each."""
    if len(said) == 2:
        return [f"{which}: {warning}" for which, warnings in said.items() for warning in warnings]
    kinds = Counter(kind for warnings in said.values() for kind in {one.partition(":")[0] for one in warnings})
    return [f"{kind}: {count} of {len(said)} runs" for kind, count in sorted(kinds.items())]


def _contended_text(contended: Sequence[str], runs: int) -> str:
    where = f"the {' and the '.join(contended)}" if runs == 2 else f"{len(contended)} of {runs} runs"
    return f"others competed for the processor in {where}: measure again on an idle machine"


def _difference(what: str, values: Sequence[str | None]) -> list[str]:
    found = list(dict.fromkeys(value for value in values if value is not None))
    return [f"{what} differs: {' and '.join(found)}"] if len(found) > 1 else []


def _batches(samples: Sequence[float | None]) -> list[str]:
    """Where steps take unlike numbers of samples, the ratio is not that of their speeds."""
    known = [one for one in samples if one]
    if not known or max(known) <= SAME_BATCH * min(known):
        return []
    sizes = " and ".join(f"{one:.4g}" for one in dict.fromkeys(known))
    return [f"steps of unlike size: {sizes} samples a step; the ratio is that of steps, not of samples per second"]


def _check_machines(machines: dict[str, Document]) -> None:
    (first, expected), *others = machines.items()
    for which, machine in others:
        if machine["fingerprint"] != expected["fingerprint"]:
            called = "two results" if len(machines) == 2 else f"{first} and {which}"
            raise MachinesDiffer(
                f"the {called} are from different machines",
                limit="; ".join(machine_differences(expected, machine)),
                remedy=_RERUN,
            )


def machine_differences(a: Document, b: Document) -> list[str]:
    """In words; the fingerprints if the documents hold nothing more."""
    aspects: dict[str, Callable[[Document], object]] = {
        "processor": lambda m: m["cpu"]["name"],
        "cores": lambda m: m["cpu"]["available_cores"],
        "memory": lambda m: format_bytes(m["memory_total_bytes"]),
        "GPUs": lambda m: ", ".join(gpu["name"] for gpu in m["devices"]) or "none",
    }
    try:
        seen = {name: (printable(str(aspect(a))), printable(str(aspect(b)))) for name, aspect in aspects.items()}
    except (KeyError, TypeError, ValueError):
        seen = {}  # they hold less, or something else
    found = [f"{name}: {left} and {right}" for name, (left, right) in seen.items() if left != right]
    return found or [f"fingerprints {printable(a['fingerprint'])} and {printable(b['fingerprint'])}"]


def _measurement(doc: Document, which: str) -> Measurement:
    data = doc.get("measurement")
    if data is None:
        kind = doc.get("flatout", {}).get("document")
        raise UsageError(
            f"the {which} document (a {kind!r}) holds no measurement", remedy="pass what `flatout run` wrote"
        )
    try:
        found = decode(Measurement, {key: value for key, value in data.items() if key in _MEASURED})
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the {which} document's measurement is malformed: {error}", remedy="pass what `flatout run` wrote"
        ) from error
    if not found.samples_seconds:
        raise UsageError(f"the {which} document has no samples", limit="a comparison needs some of each side")
    for one in found.samples_seconds:
        if not SHORTEST_SECONDS <= one <= LONGEST_SECONDS:
            raise UsageError(
                f"the {which} document has a sample of {str(one)[:20]} seconds",
                limit=f"a step takes {SHORTEST_SECONDS:g} s to {LONGEST_SECONDS:g} s",
                remedy="pass what `flatout run` wrote",
            )
    return found


def _machine(doc: Document, which: str) -> Document:
    machine = doc.get("machine")
    if not isinstance(machine, dict) or not isinstance(machine.get("fingerprint"), str):
        raise UsageError(f"the {which} document does not say on which machine it was measured", remedy=_RERUN)
    return machine


def script_name(doc: Document) -> str:
    """'' where the document names none."""
    return _text(doc, "script", "name") or ""


def _part(doc: Document, name: str) -> Document:
    """Empty where the document has no such part."""
    part = doc.get(name)
    return part if isinstance(part, dict) else {}


def _arguments(doc: Document) -> str | None:
    """Their digest; None where the document does not tell."""
    script = _part(doc, "script")
    given = script.get("arguments")
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        return arguments_digest(given)
    digest = script.get("arguments_digest")
    return digest if isinstance(digest, str) else None


def _samples(doc: Document) -> float | None:
    """Of a step; None where the document does not tell."""
    found = doc.get("samples_per_step")
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and found > 0 else None


def _text(doc: Document, part: str, key: str) -> str | None:
    """None where the document does not tell."""
    found = _part(doc, part).get(key)
    return printable(found) if isinstance(found, str) else None


def _ending(doc: Document) -> list[str]:
    """What speaks against a script that did not end well: it may have trained another way than one that did."""
    status = _part(doc, "script").get("status", 0)
    if status is None:
        return ["the script had not ended when this was written"]
    return [f"the script ended with status {status}"] if isinstance(status, int) and status != 0 else []


def comparison_text(found: DocumentComparison) -> str:
    """For people: the verdict first, then what it rests on."""
    c = found.comparison
    reason = f" ({c.reason})" if c.reason else ""
    verdict = "undecided" if found.contended else c.verdict  # its interval may well exclude 1
    lines = [f"verdict    {verdict}{reason}", f"ratio      x{c.ratio:.3f}, {_interval(c, found.unit)}"]
    for label, runs in (("first", found.baseline), ("second", found.candidate)):
        lines += [f"{label if number == 0 else '':<10} {_measured_text(one)}" for number, one in enumerate(runs)]
    lines += [f"{'caveat' if i == 0 else '':<10} {caveat}" for i, caveat in enumerate(found.caveats)]
    return "\n".join(map(_row, lines))


def _row(text: str) -> str:
    """One line whatever the documents name, and none that a GitHub workflow takes for a command, blanks before it or
    not."""
    line = printable(text)
    return line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line


def _measured_text(one: Measurement) -> str:
    return f"{one.name}: {format_seconds(one.median_seconds)} a step, {one.spread}"


def _interval(found: Comparison, unit: str) -> str:
    if not found.has_interval:
        return f"{counted(found.pairs, 'run' if unit == 'runs' else 'sample')}, too few for an interval"
    return f"{found.confidence:.0%} interval x{found.low:.3f} to x{found.high:.3f}"
