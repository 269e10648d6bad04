"""What a run applies of a plan: its FLOPs, what is verified, and what a process that starts over is told."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout import environment
from flatout.application.applied_plan import AppliedPlan
from flatout.levers.allocator import PreloadedAllocator
from flatout.machine.detect import detect
from flatout.plan import Plan, write_plan
from flatout.script.entry import Target
from flatout.script.own_files import source_digests


class StartedOver(Exception):
    """In place of the process that would go on."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path


def applied(*arguments: str, script: str = "train.py") -> AppliedPlan:
    target = Target(path=script, arguments=arguments)
    return AppliedPlan(target, visible_before=None, announce=print, while_verifying=pytest.fail)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "batch", "flops"), [("train.py", "8", 1e9), ("train.py", "64", None), ("other.py", "8", None)]
)
def test_flops_are_those_of_the_same_script_with_the_same_arguments(
    script: str, batch: str, flops: float | None
) -> None:
    write_plan("p.toml", Plan(script="train.py", argv=("--batch", "8"), threads=1, flops_per_step=1e9))
    run = applied("--batch", batch, script=script)
    run.read("p.toml")
    assert run.plan is not None
    assert (run.plan.choices(), run.plan.flops_per_step) == ({"threads": 1}, flops)


def test_flops_of_a_plan_that_names_no_script_are_of_another_step() -> None:
    write_plan("p.toml", Plan(threads=1, flops_per_step=1e9))
    run = applied()
    run.read("p.toml")
    assert run.plan is not None
    assert run.plan.flops_per_step is None


def test_a_plan_from_elsewhere_is_verified_once_where_an_allocator_has_to_be_preloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, given = detect(), {"script": "train.py", "argv": ("--key", "secret")}
    held = Plan(
        allocator="jemalloc",
        machine_fingerprint=machine.fingerprint,
        torch_version=machine.versions.torch,
        flops_per_step=2e9,
        **given,  # type: ignore[arg-type]
    )
    write_plan("p.toml", Plan(allocator="jemalloc", threads=1, machine_fingerprint="another", **given))  # type: ignore[arg-type]
    tunes: list[object] = []

    def tune(*asked: object) -> Any:
        tunes.append(asked)
        return SimpleNamespace(plan=held)

    def start_over(program: str, words: list[str], variables: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", dict(variables))
        raise StartedOver

    monkeypatch.setattr("flatout.tuning.script_tuning.tune_script", tune)
    monkeypatch.setattr(os, "execve", start_over)
    monkeypatch.setattr(PreloadedAllocator, "environment", lambda self, value: {"LD_PRELOAD": "/lib/libjemalloc.so"})
    first, second = (applied("--key", "secret") for _ in range(2))
    first._while_verifying = contextlib.nullcontext
    first.read("p.toml")
    with pytest.raises(StartedOver):
        first.choose(trusted=False)
    assert environment.preloaded_libraries() == "/lib/libjemalloc.so"
    assert "secret" not in environment.variables()[environment.VERIFIED_PLAN]
    second.read("p.toml")
    second.choose(trusted=False)
    assert len(tunes) == 1
    assert environment.verified_plan() is None  # the script does not see it
    assert [choice.field for choice in second.choices] == ["allocator"]
    assert second.plan is not None
    assert second.plan.flops_per_step == 2e9
    assert (second.notes, second.missed) == (first.notes, first.missed)
    assert "verified here: allocator holds" in second.missed[0]


def test_processes_that_cannot_be_followed_are_a_miss_only_with_choices() -> None:
    plain = applied()
    plain.note_unfollowed("PermissionError")
    assert (plain.notes, plain.missed) == (["processes that the script starts are not watched (PermissionError)"], [])


@pytest.mark.parametrize("edited", [False, True])
def test_a_plan_for_what_the_script_was_before_an_edit(folder: Path, edited: bool) -> None:
    """Its numbers were proved, and its FLOPs counted, for that."""
    (folder / "train.py").write_text("import net\n")
    (folder / "net.py").write_text("width = 8\n")
    sources, machine = source_digests(Target(path="train.py")), detect()
    plan = Plan(
        script="train.py", threads=1, loop="a loop", flops_per_step=1e9, sources=sources,
        machine_fingerprint=machine.fingerprint, torch_version=machine.versions.torch,
    )  # fmt: skip
    write_plan("p.toml", plan)
    if edited:
        (folder / "net.py").write_text("width = 16\n")
    run = applied()
    run.read("p.toml")
    run.choose(trusted=False)
    assert run.plan is not None
    assert run.plan.flops_per_step == (None if edited else 1e9)
    assert run.proved_for == ("a loop" if edited else None)
    assert run.notes == ["net.py changed since the tune: tune again to be sure"] * edited


def test_the_number_of_devices_is_known_before_the_script_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every run asks for it first, and reading all of a script's own files takes a while."""
    plan = Plan(script="train.py", devices=2, sources=("sha256:0 train.py",), flops_per_step=1e9)
    write_plan("p.toml", plan)
    monkeypatch.setattr("flatout.script.own_files.own_files", lambda target: pytest.fail("they were read"))
    run = applied()
    run.read("p.toml")
    assert run.plan is not None
    assert run.plan.devices == 2


@pytest.mark.parametrize(("script", "other"), [("train.py", False), ("other.py", True), ("moved/train.py", False)])
def test_a_plan_for_another_script(folder: Path, script: str, other: bool) -> None:
    """What was proved in lower precision is applied to the loop that was tuned; the same file elsewhere is the same."""
    (folder / "moved").mkdir()
    for name in ("train.py", "moved/train.py"):
        (folder / name).write_text("x = 1\n")
    (folder / "other.py").write_text("y = 1\n")
    machine = detect()
    plan = Plan(
        script="train.py", threads=1, loop="a loop", sources=source_digests(Target(path="train.py")),
        machine_fingerprint=machine.fingerprint, torch_version=machine.versions.torch,
    )  # fmt: skip
    write_plan("p.toml", plan)
    run = applied(script=script)
    run.read("p.toml")
    run.choose(trusted=False)
    assert run.proved_for == ("a loop" if other else None)
    assert run.notes == ["the plan was tuned for train.py, not for this script: tune this one to be sure"] * other
