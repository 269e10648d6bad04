"""The state of a run as a value: what it holds, that it is bounded, and what another process makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from flatout.diagnose import seen_run
from flatout.diagnose.run_energy import TOO_EARLY, EnergyWatch, energy_of, trained_on
from flatout.diagnose.run_state import MOST_POINTS, RunState, RunStates
from flatout.diagnose.seen_run import condition_of
from flatout.machine.device_rates import Devices
from flatout.script.entry import Target
from flatout.script.runner import Runner
from flatout.script.spans import StepRow
from tests.live_states import gpu_reading, reading, run_state


def states(runner: Runner) -> RunStates:
    target = Target(path="train.py", arguments=("--key", "secret"))
    return RunStates(target, runner, plan=None, notes=("left off: threads (for another machine)",), command="train.py")


def test_a_run_before_its_first_step() -> None:
    found = states(Runner()).now()
    assert (found.steps, found.step_seconds, found.device, found.epoch) == (0, None, None, None)
    assert found.notes == ("left off: threads (for another machine)",)
    assert found.flops_unknown_because
    assert condition_of(found) == "running"


def test_a_state_is_small_however_long_the_run() -> None:
    runner = Runner()
    record = runner.record
    for step in range(100_000):
        record.add_steps(0.01, 1)
        record.steps = step + 1
    for second in range(10_000):
        record.add_resident(1 << 30, float(second))
    record.add_rows([StepRow(seconds=0.01, parts={"data": 0.005, "forward": 0.004})] * 40)
    record.mark_step(1.0)
    found = states(runner).now()
    text = json.dumps(found.to_json())
    assert len(text) < 8_000
    assert "secret" not in text
    assert RunState.from_json(json.loads(text)) == found
    assert MOST_POINTS / 2 < len(found.step_curve) <= MOST_POINTS
    assert found.step_curve[-1] == record.samples[-1]
    assert found.parts_seconds["data"] == pytest.approx(0.01 * 5 / 9)
    assert [one.name for one in found.findings] == ["starved-loader"]
    assert found.findings[0].next_command == "flatout tune train.py"


def test_the_end_is_in_it() -> None:
    found = states(Runner()).now(status=3, ended=True)
    assert (found.ended, found.status, condition_of(found)) == (True, 3, "ended")


def test_a_process_that_is_gone_was_killed() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert condition_of(run_state(pid=done.pid, process_started="1")) == "killed"
    assert condition_of(run_state(process_started="1")) == "killed"  # the number has gone to another process
    assert condition_of(run_state(pid_namespace="pid:[1]")) == "unknown"
    assert condition_of(run_state()) == "running"


def test_a_stopped_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_run, "process_condition", lambda pid, started: "stopped")
    assert condition_of(run_state()) == "stopped"


# energy


def devices(*, seconds: float = 4.0, **changes: Any) -> Devices:
    usual: dict[str, Any] = {"reading": reading(4.0), "seconds": seconds}
    return Devices(**(usual | changes))


BEFORE = run_state(steps=1000, written_clock=100.0, samples_per_step=8)
AFTER = run_state(steps=1200, written_clock=104.0, samples_per_step=8)
ON_GPU = {"device": "cuda:0", "visible_devices": None}


def test_energy_of_the_processor() -> None:
    found = energy_of(BEFORE, AFTER, devices(cpu_watts=100.0))
    assert (found.of_what, found.joules_per_step, found.joules_per_sample) == ("the processor", 2.0, 0.25)


def test_energy_of_a_gpu() -> None:
    seen = devices(reading=reading(4.0, gpu_reading(), gpu_reading(index=1, uuid="GPU-2")), gpu_watts=(500.0, 80.0))
    found = energy_of(replace(BEFORE, **ON_GPU), replace(AFTER, **ON_GPU), seen)
    assert (found.of_what, found.joules_per_step) == ("GPU 0", 10.0)
    other = replace(AFTER, device="cuda:0", visible_devices="1")
    assert energy_of(BEFORE, other, seen).of_what == "GPU 1"


@pytest.mark.parametrize(
    ("state", "seen", "why"),
    [
        (AFTER, devices(), TOO_EARLY),
        (AFTER, devices(seconds=1.0, cpu_watts=50.0), TOO_EARLY),
        (replace(AFTER, steps=1000), devices(cpu_watts=50.0), TOO_EARLY),
        (
            AFTER,
            devices(reading=reading(4.0, unknown={"energy_joules": "only root may read it"})),
            "only root may read it",
        ),
        (replace(AFTER, device=None), devices(cpu_watts=50.0), "no step was seen yet"),
        (replace(AFTER, **ON_GPU), devices(), "no NVIDIA driver is installed"),
        (
            replace(AFTER, **ON_GPU),
            devices(
                reading=reading(4.0, gpu_reading(energy_joules=None, unknown={"energy_joules": "Not Supported"})),
                gpu_watts=(None,),
            ),
            "Not Supported",
        ),
    ],
)
def test_energy_that_was_not_measured_is_unknown(state: RunState, seen: Devices, why: str) -> None:
    found = energy_of(BEFORE, state, seen)
    assert (found.joules_per_step, found.joules_per_sample, found.unknown_because) == (None, None, why)


def test_samples_that_are_not_counted_leave_the_energy_of_a_step() -> None:
    state = replace(AFTER, samples_per_step=None, samples_unknown_because="several DataLoaders feed training")
    found = energy_of(BEFORE, state, devices(cpu_watts=100.0))
    assert (found.joules_per_step, found.joules_per_sample) == (2.0, None)
    assert found.unknown_because == "several DataLoaders feed training"


def test_energy_over_the_last_seconds() -> None:
    watch = EnergyWatch()
    for second in range(30):
        state = run_state(steps=second**2, written_clock=float(second), samples_per_step=1)
        found = watch.add(state, devices(seconds=10.0, cpu_watts=100.0))
    assert found.joules_per_step == pytest.approx(100.0 * 11 / (29**2 - 18**2))


def test_a_gpu_that_the_driver_does_not_list() -> None:
    assert trained_on(run_state(device="cuda:3"), (gpu_reading(),)) is None
    assert trained_on(run_state(), (gpu_reading(),)) is None
