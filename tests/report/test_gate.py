"""The gate's three answers, and that what it writes for CI stays inert whatever a script is called."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from flatout.report.compare import DocumentComparison
from flatout.report.gate import GateVerdict, github_annotation, judge, junit_xml
from flatout.statistics import Comparison


def compared(
    low: float, high: float, *, contended: tuple[str, ...] = (), reason: str | None = None
) -> DocumentComparison:
    """`low`, `high`: the interval of the slowdown."""
    found = Comparison(
        ratio=1 / (1 + (low + min(high, 1.0)) / 2),
        low=1 / (1 + high) if high != float("inf") else 0.0,
        high=1 / (1 + low) if high != float("inf") else float("inf"),
        confidence=0.95,
        pairs=5,
        verdict="not significant",
        reason=reason,
    )
    return DocumentComparison(
        name="train.py",
        unit="runs",
        baseline=(),
        candidate=(),
        comparison=found,
        machine_fingerprint="m",
        contended=contended,
        caveats=(),
    )


@pytest.mark.parametrize(
    ("low", "high", "threshold", "verdict", "reason"),
    [
        (0.05, 0.09, 0.03, "slower", "at least 5% slower, beyond the threshold of 3%"),
        (0.01, 0.02, 0.03, "not slower", "at most 2% slower, within the threshold of 3%"),
        (-0.09, -0.05, 0.03, "not slower", "at least 5% faster"),
        (-0.01, 0.05, 0.03, "undecided", "between 1% faster and 5% slower, with the threshold of 3% inside"),
        (0.01, 0.05, 0.03, "undecided", "between 1% slower and 5% slower"),
        (0.01, 0.05, 0.0, "slower", "at least 1% slower"),
    ],
)
def test_three_answers(low: float, high: float, threshold: float, verdict: GateVerdict, reason: str) -> None:
    found = judge(compared(low, high), threshold)
    assert found.verdict == verdict
    assert found.reason.startswith(reason)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_competitors_or_no_interval_leave_it_undecided() -> None:
    crowded = judge(compared(0.5, 0.6, contended=("second",), reason="others competed"), 0.03)
    assert (crowded.verdict, crowded.reason) == ("undecided", "others competed")
    few = judge(compared(0.5, float("inf"), reason="2 runs are too few"), 0.03)
    assert (few.verdict, few.reason, few.low, few.high) == ("undecided", "2 runs are too few", None, None)
    assert (few.exit_code("fail"), few.exit_code("pass")) == (4, 0)


def test_runs_of_different_scripts_are_undecided_whatever_their_times() -> None:
    for low, high in ((-0.5, -0.4), (0.5, 0.6), (0.0, 0.01)):
        found = judge(replace(compared(low, high), scripts=("a.py", "b.py")), 0.03)
        assert found.verdict == "undecided"
        assert found.reason == "the runs are of different scripts, a.py and b.py: compare runs of one script"
    assert judge(replace(compared(-0.5, -0.4), scripts=("a.py",)), 0.03).verdict == "not slower"


HOSTILE = "a%,b:c\r\n::error::owned\x00<x y='\"'>&]]>"


def test_a_hostile_name_stays_inside_its_annotation() -> None:
    line = github_annotation(HOSTILE, judge(compared(0.05, 0.09), 0.03), "", "fail")
    assert len(line.splitlines()) == 1
    assert line.startswith("::error title=a%25%2Cb%3Ac%0D%0A%3A%3Aerror%3A%3Aowned")
    assert line.endswith("hits both alike)")
    failed = github_annotation("", None, "100% wrong\n::warning::x", "fail")
    assert failed == "::error title=candidate%3A not comparable::100%25 wrong%0A::warning::x"


def test_a_hostile_name_stays_a_name_in_xml() -> None:
    text = junit_xml(HOSTILE, 0.03, judge(compared(0.05, 0.09), 0.03), "", "fail")
    case = ElementTree.fromstring(text).find("testsuite/testcase")
    assert case is not None
    assert case.attrib["name"].startswith("a%,b:c")
    assert "<x y='\"'>&]]>" in case.attrib["name"]
    assert "\x00" not in text
    assert [one.tag for one in case] == ["failure"]
    assert ElementTree.fromstring(text).attrib | {"name": ""} == {
        "name": "",
        "tests": "1",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
    }
