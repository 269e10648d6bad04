"""`flatout.check`: a value, of which the command line is a view."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.application import check as application
from flatout.diagnose.finding import Finding
from flatout.errors import MachineError
from flatout.machine.ceilings import Ceilings
from flatout.machine.description import Machine

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text())
MACHINE = Machine.from_json({**RECORDED, "ceilings": None})


def finding(severity: Any) -> Finding:
    return Finding(name="n", severity=severity, title="t", evidence="e", remedy="r")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "detect", lambda: MACHINE)
    monkeypatch.setattr(application, "gather_facts", lambda: None)
    monkeypatch.setattr(application, "check_machine", lambda machine, facts: [])


@pytest.mark.parametrize(
    ("severities", "ok", "code", "problems"),
    [([], True, 0, 0), (["note"], True, 0, 0), (["note", "warning"], False, 2, 1), (["unusable"], False, 1, 1)],
)
def test_what_is_found_decides(
    monkeypatch: pytest.MonkeyPatch, severities: list[str], ok: bool, code: int, problems: int
) -> None:
    found = [finding(one) for one in severities]
    monkeypatch.setattr(application, "check_machine", lambda machine, facts: found)
    result = flatout.check()
    assert (result.ok, result.exit_code, len(result.problems)) == (ok, code, problems)
    assert result.findings == tuple(found)
    assert result.to_json()["machine"]["ceilings"] is None
    assert result.summary().splitlines()[-1].startswith("verdict")


def test_ceilings_are_measured_where_torch_works_and_kept_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = replace(Ceilings.from_json(RECORDED["ceilings"]), contended=True)
    told: list[str] = []

    def measure(machine: Machine, *, quick: bool, progress: Any) -> Ceilings:
        progress("a product")
        return ceilings

    def full(machine: Machine, ceilings: Ceilings) -> None:
        raise MachineError("the disk is full")

    monkeypatch.setattr(application, "measure_ceilings", measure)
    monkeypatch.setattr(application, "save_ceilings", full)
    result = flatout.check(measure=True, progress=told.append)
    assert result.machine.ceilings == ceilings
    assert told == ["a product"]
    assert result.warnings == (application.CONTENDED, "the disk is full")
    monkeypatch.setattr(application, "check_machine", lambda machine, facts: [finding("unusable")])
    monkeypatch.setattr(application, "measure_ceilings", lambda *_, **__: pytest.fail("torch does not work"))
    assert flatout.check(measure=True).machine.ceilings is None
