"""What a run's facts lead to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts, RunFacts
from flatout.levers.observed import ModuleSeen, Observed
from flatout.script.epochs import EpochStarts
from flatout.script.growth import Growth

SEEN = Observed(step_seconds=0.01, breakdown_seconds={"forward": 0.01}, modules=(ModuleSeen(kind="Net", parameters=1),))


OF_RUN = ("steps", "growth", "nearly_out", "rolled_back", "epochs")


def facts(**given: Any) -> Facts:
    given = {"observed": SEEN, "steps": 9, "planned": True, "command": "train.py"} | given
    run = RunFacts(**{name: given.pop(name) for name in OF_RUN if name in given})
    return Facts(run=run, **given)


def names(**given: Any) -> list[str]:
    return [finding.name for finding in check_facts(facts(**given))]


def epochs(
    cost: float, *, workers: int = 4, persistent: bool = False, step: float = 0.01, steps: int = 1
) -> EpochStarts:
    """Three epochs of ten seconds; the first step of each ends `cost` seconds late."""
    loader = SimpleNamespace(num_workers=workers, persistent_workers=persistent)
    seen = EpochStarts()
    for number in range(3):
        seen.iterator_made(loader, 10.0 * number, number * steps)
        seen.step_ended(10.0 * number + cost + step, step)
        seen.step_ended(10.0 * number + cost + 2 * step, step)
    return seen


def test_dear_starts_of_epochs_are_told_where_workers_could_live_on() -> None:
    assert names(epochs=epochs(1.0)) == ["worker-restart"]
    assert names(epochs=epochs(0.05)) == []
    assert names(epochs=epochs(1.0, workers=0)) == []
    assert names(epochs=epochs(1.0, persistent=True)) == []
    assert names(epochs=EpochStarts()) == []
    (finding,) = check_facts(facts(epochs=epochs(1.0)))
    assert finding.cost_share is not None
    assert abs(finding.cost_share - 0.1) < 1e-9
    assert "persistent_workers=True" in finding.remedy
    assert finding.cost_seconds is not None
    expected = 0.1 * (SEEN.step_seconds or 0.0)  # a share of a step, not the seconds of a start
    assert abs(finding.cost_seconds - expected) < 1e-9


def test_a_gpu_that_idles_is_told_once_the_weights_are_on_the_cpu() -> None:
    assert names(gpus=("NVIDIA H200",)) == ["model-on-cpu"]
    known = facts(planned=False, command="t.py", gpus=("NVIDIA H200",))
    (finding,) = check_facts(known)
    assert finding.next_command == "flatout tune t.py"
    (finding,) = check_facts(replace(known, observed=replace(SEEN, names_device=True)))
    assert finding.next_command is None
    assert names(gpus=("NVIDIA H200",), observed=Observed(device="cuda:0", modules=SEEN.modules)) == []
    assert names() == []


def test_memory_that_was_nearly_out_is_told() -> None:
    assert names(nearly_out=(12, 1 << 20, 1 << 30)) == ["memory-nearly-out"]


def test_growth_is_told_by_the_clock_and_only_from_a_gibibyte_an_hour() -> None:
    def grown(size_bytes: int, steps: int = 50) -> Growth:
        return Growth(first_bytes=1 << 30, last_bytes=(1 << 30) + size_bytes, seconds=100.0, steps=steps)

    assert names(growth=grown(20 << 20)) == []
    assert names(growth=grown(40 << 20)) == ["memory-leak"]
    assert names(growth=grown(40 << 20, steps=0)) == ["memory-leak"]


def test_the_start_of_workers_never_takes_more_than_the_steps_leave() -> None:
    seen = epochs(9.0, step=1.0, steps=8)  # of ten seconds, eight steps take eight
    assert seen.cost_seconds == pytest.approx(2.0)


def test_batches_are_data_loading_only_where_a_loader_makes_them() -> None:
    parts = {"forward": 0.004, "backward": 0.002, "other": 0.004}
    seen = replace(SEEN, breakdown_seconds=parts | {"data": 0.0})
    (without,) = check_facts(facts(observed=seen))
    assert without.title.endswith("of a step is spent outside the model and optimizer")
    assert without.remedy.endswith("making its batches included")
    (loaded,) = check_facts(facts(observed=replace(seen, breakdown_seconds=parts | {"data": 0.001})))
    assert "outside the model, data loading and optimizer" in loaded.title
    assert "batches" not in loaded.remedy
