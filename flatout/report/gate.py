"""A regression gate: is the candidate slower by more than matters? For CI: exit codes, JUnit, GitHub annotations.

Without a smallest slowdown that matters, equal code would be 'undecided' forever: no interval excludes a slowdown of
nothing. With one there are three answers: the whole interval lies beyond it (slower), the whole interval lies within it
(not slower), or it lies in between (undecided: more runs narrow it).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from typing import Literal

from flatout.report.compare import DocumentComparison

GateVerdict = Literal["not slower", "slower", "undecided"]
OnUndecided = Literal["pass", "fail"]

EXIT_CODES: dict[GateVerdict, int] = {"not slower": 0, "slower": 3, "undecided": 4}
_TITLE = "flatout compare"
_STEPS_ASSUME = (
    "the machine was equally fast during both runs: with one run of each side the interval covers the spread of steps, "
    "not that between runs, which it understates; pass 3 runs or more of each"
)
_RUNS_ASSUME = "runs of both sides were taken in turns, so that drift of the machine hits both alike"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Slowdowns are shares of the baseline's time: 0.05 is 5 % slower, -0.05 is 5 % less time. `low` and `high` are the
    ends of its confidence interval, None where there are too few samples for one."""

    verdict: GateVerdict
    threshold: float
    slowdown: float
    low: float | None
    high: float | None
    reason: str
    assumes: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def exit_code(self, on_undecided: OnUndecided) -> int:
        passes = self.verdict == "undecided" and on_undecided == "pass"
        return 0 if passes else EXIT_CODES[self.verdict]


def judge(found: DocumentComparison, threshold: float) -> Gate:
    """`threshold`: the smallest slowdown that matters, as a share (0.03: 3 %)."""
    c = found.comparison
    low, high = (1 / c.high - 1, 1 / c.low - 1) if c.has_interval else (None, None)
    verdict, reason = _verdict(low, high, threshold)
    if found.contended or low is None:
        verdict, reason = "undecided", c.reason or "too few samples"
    if len(found.scripts) > 1:
        verdict = "undecided"
        reason = f"the runs are of different scripts, {' and '.join(found.scripts)}: compare runs of one script"
    return Gate(
        verdict=verdict,
        threshold=threshold,
        slowdown=1 / c.ratio - 1,
        low=low,
        high=high,
        reason=reason,
        assumes=_STEPS_ASSUME if found.unit == "steps" else _RUNS_ASSUME,
    )


def _verdict(low: float | None, high: float | None, threshold: float) -> tuple[GateVerdict, str]:
    if low is None or high is None:
        return "undecided", ""
    limit = f"the threshold of {_share(threshold)}"
    if low > threshold:
        return "slower", f"at least {_share(low)} slower, beyond {limit}"
    if high <= threshold:
        known = f"at most {_share(high)} slower, within {limit}" if high > 0 else f"at least {_share(-high)} faster"
        return "not slower", known
    return "undecided", f"between {_change(low)} and {_change(high)}, with {limit} inside: more runs decide"


def _share(share: float) -> str:
    return f"{share * 100:.3g}%"


def _change(slowdown: float) -> str:
    return f"{_share(abs(slowdown))} {'slower' if slowdown >= 0 else 'faster'}"


def gate_text(gate: Gate) -> str:
    """For people, above the comparison."""
    return f"gate       {gate.verdict}: {gate.reason}\nassumes    {gate.assumes}"


def junit_xml(name: str, threshold: float, gate: Gate | None, failure: str, on_undecided: OnUndecided) -> str:
    """One test case. Without a gate the results could not be compared, because of `failure`."""
    kind = _junit_kind(gate, on_undecided)
    counts = {key: str(int(kind == element)) for key, element in _JUNIT_COUNTS.items()}
    suites = ElementTree.Element("testsuites", {"name": _TITLE, "tests": "1", **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": _TITLE, "tests": "1", **counts})
    called = _legal_xml(f"{name or 'candidate'}: not slower by more than {_share(threshold)}")
    case = ElementTree.SubElement(suite, "testcase", {"classname": "flatout.compare", "name": called})
    said = _legal_xml(_said(gate, failure))
    if kind:
        verdict = gate.verdict if gate is not None else "not comparable"
        ElementTree.SubElement(case, kind, {"message": said, "type": verdict})
    else:
        ElementTree.SubElement(case, "system-out").text = said
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


_JUNIT_COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def _junit_kind(gate: Gate | None, on_undecided: OnUndecided) -> str:
    """The element that says how it ended; '' where the test passed."""
    if gate is None:
        return "error"
    if gate.exit_code(on_undecided):
        return "failure"
    return "skipped" if gate.verdict == "undecided" else ""


def _legal_xml(text: str) -> str:
    """XML 1.0 has no form for control characters and lone surrogates, not even escaped."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def github_annotation(name: str, gate: Gate | None, failure: str, on_undecided: OnUndecided) -> str:
    """A workflow command: an error where the job is to fail, a warning where it passes undecided, else a notice."""
    fails = gate is None or gate.exit_code(on_undecided)
    level = "error" if fails else "warning" if gate is not None and gate.verdict == "undecided" else "notice"
    title = f"{name or 'candidate'}: {gate.verdict if gate is not None else 'not comparable'}"
    return f"::{level} title={_github_property(title)}::{_github_data(_said(gate, failure))}"


def _said(gate: Gate | None, failure: str) -> str:
    if gate is None:
        return failure
    return f"{gate.verdict}: {gate.reason} (assumes that {gate.assumes})"


def _github_data(text: str) -> str:
    """As @actions/core escapes a command's message: a line break would end the command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(text).replace(":", "%3A").replace(",", "%2C")
