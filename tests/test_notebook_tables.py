"""What values show of themselves in a notebook: small tables, in which nothing is HTML but what we wrote."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

import flatout
from flatout.application.check import CheckResult
from flatout.application.run import RunResult
from flatout.machine.description import Machine
from flatout.notebook_tables import ShownAsText, table_html
from flatout.report.html.verdicts import verdict_html
from tests.report.html.documents import RUN, TUNE

MACHINE = Machine.from_json(json.loads((Path(__file__).parent / "recorded" / "machine_two_cores.json").read_text()))
EVIL = "</table><script>alert('x')</script>"


def test_texts_are_escaped() -> None:
    html = table_html(EVIL, [(EVIL, EVIL, EVIL)])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 4
    assert html.count("<td") == 2


def test_a_plan_shows_its_choices_and_reasons() -> None:
    html = flatout.Plan(threads=2, speedup=1.5)._repr_html_()
    assert "Plan: 1.50 times as fast" in html
    assert flatout.Plan(threads=2).with_choice("precision", "bf16", EVIL)._repr_html_().count("&lt;script&gt;") == 1
    assert "changes nothing" in flatout.Plan()._repr_html_()


def test_a_machine_and_a_measurement() -> None:
    assert MACHINE.cpu.name in MACHINE._repr_html_()
    found = flatout.Measurement(name="step", samples_seconds=(0.01, 0.012, 0.011), warnings=("too few samples",))
    html = found._repr_html_()
    assert "11 ms" in html
    assert "too few samples" in html


def test_a_measurement_of_many_samples_is_short_in_a_console() -> None:
    found = flatout.Measurement(name="step", samples_seconds=(0.01, 0.012) * 500, warnings=("contended",))
    expected = "step: 11 ms (95 % interval 10 ms to 12 ms), middle half within 2 ms, n = 1000\ncontended"
    assert str(found) == expected
    assert len(repr(found)) < 200
    ran = RunResult(status=0, steps=40, measurement=found, peak_resident_bytes=None, document=RUN)
    assert len(repr(ran)) < 500


SHOWN_AS_TEXT = [
    "BatchCurve",
    "CheckResult",
    "FitToMemory",
    "Generation",
    "InferenceTuning",
    "LargestBatch",
    "MemoryForecast",
    "ProfileResult",
    "TuneResult",
    "WhatIf",
]


@pytest.mark.parametrize("name", SHOWN_AS_TEXT)
def test_results_that_print_as_text_are_shown_so(name: str) -> None:
    kind = getattr(flatout, name)
    assert issubclass(kind, ShownAsText)
    assert kind.__str__ is not object.__str__
    assert kind.__repr__ is ShownAsText.__repr__


def test_text_is_escaped_and_shown_by_ipython_as_it_is() -> None:
    class Result(ShownAsText):
        def __str__(self) -> str:
            return f"peak\n{EVIL}"

    assert "peak\n&lt;/table&gt;&lt;script&gt;" in Result()._repr_html_()
    printer = Mock()
    Result()._repr_pretty_(printer, False)
    printer.text.assert_called_once_with(f"peak\n{EVIL}")
    assert repr(Result()) == "<Result: peak>"


def test_a_plan_in_a_console_leaves_out_what_is_not_set() -> None:
    plan = flatout.Plan(threads=2, precision="bf16").with_choice("optimizer", "fused", "x1.2 here")
    assert repr(plan) == "Plan(threads=2, optimizer='fused', precision='bf16', reasons={'optimizer': 'x1.2 here'})"
    assert eval(repr(plan), {"Plan": flatout.Plan}) == plan
    assert repr(flatout.Plan()) == "Plan()"


def test_results_show_their_verdict() -> None:
    assert "1.44 times as fast" in verdict_html("tune", TUNE)
    finding = flatout.Finding.from_json(RUN["findings"][1])
    ran = RunResult(status=0, steps=40, measurement=None, peak_resident_bytes=None, findings=(finding,), document=RUN)
    assert "Ran out of memory at train.py:30" in ran._repr_html_()
    assert finding.title in ran._repr_html_()
    assert "exit code 3" in RunResult(status=3, steps=None, measurement=None, peak_resident_bytes=None)._repr_html_()
    assert "Machine: fine" in CheckResult(machine=MACHINE, findings=())._repr_html_()
