"""The corpus of `benchmarks.diagnose` is what it says of itself."""

from __future__ import annotations

import ast
import difflib

import pytest

from benchmarks.diagnose import catalogue
from benchmarks.diagnose.catalogue import Script

SCRIPTS = catalogue.scripts()
FAULTY = [one for one in SCRIPTS if one.role == "faulty"]


def healthy_version(script: Script) -> Script:
    return next(one for one in SCRIPTS if one.name == f"{script.pair}/healthy")


def test_it_is_as_large_as_promised() -> None:
    cpu = [one for one in SCRIPTS if one.device == "cpu"]
    assert len(cpu) >= 80
    assert len({one.thread for one in FAULTY if one.thread}) >= 40
    assert len([one for one in cpu if one.role == "alone"]) >= 15
    assert {one.subject for one in FAULTY} == catalogue.SUBJECTS


@pytest.mark.parametrize("script", FAULTY, ids=lambda script: script.name)
def test_a_pair_differs_by_the_fix(script: Script) -> None:
    healthy = healthy_version(script)
    assert script.marked_lines
    assert healthy.marked_lines == ()
    assert script.accepted | script.follows <= catalogue.SUBJECTS
    assert not script.accepted & script.follows
    assert (script.subject, script.thread, script.device) == (healthy.subject, healthy.thread, healthy.device)
    before, after = script.path.read_text(), healthy.path.read_text()
    assert before.partition("\n\n")[0] == after.partition("\n\n")[0], "the same comments at the top"
    same = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changed = [max(b - a, d - c) for tag, a, b, c, d in same.get_opcodes() if tag != "equal"]
    assert 0 < sum(changed) <= 22


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_a_short_program_of_its_own(script: Script) -> None:
    text = script.path.read_text()
    ast.parse(text)
    assert len(text.splitlines()) <= 75
    assert "benchmarks" not in text
    assert ("manual_seed" in text) is not (script.subject == "no-seed" and script.role == "faulty")
    assert ("cuda" in text.partition("\n\n")[2]) == (script.device == "cuda") or script.subject in (
        "model-on-cpu",
        "slower-on-gpu",
    )
    assert script.role != "alone" or "# tricky: " in text
