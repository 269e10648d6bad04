"""The words of a run that goes on: the panel's lines and the rows of the page and of `flatout watch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.diagnose.run_energy import Energy
from flatout.machine.ceilings import Ceilings
from flatout.machine.description import GpuProcess
from flatout.machine.device_rates import Devices
from flatout.report.live_text import (
    LiveView,
    cells,
    devices_rows,
    fitted,
    live_rows,
    panel_lines,
)
from flatout.script.epochs import Epoch
from flatout.terminal import printable
from tests.live_states import FINDING, HOSTILE, gpu_reading, reading, run_state

CEILINGS = Ceilings.from_json(
    {
        name: value
        for name, value in json.loads(
            (Path(__file__).parents[1] / "recorded" / "formats" / "ceilings-1.json").read_text()
        ).items()
        if name != "schema"
    }
)
ON_GPU = {"device": "cuda:0", "visible_devices": None}


def view(
    devices: Devices | None = None, energy: Energy | None = None, clock: float = 1100.0, **changes: Any
) -> LiveView:
    return LiveView(state=run_state(**changes), clock_seconds=clock, devices=devices, energy=energy)


def on_gpu(**changes: Any) -> Devices:
    return Devices(reading=reading(4.0, gpu_reading(**changes)), seconds=4.0, gpu_watts=(600.0,))


def test_the_panel() -> None:
    lines = panel_lines(view(findings=(FINDING,)), 200)
    assert lines == [
        " flatout · step 1,234 · 12.5 ms · 80.0 steps/s · 2,560 samples/s · epoch 3, step 120 of 500, 4.75 s left",
        " data 32%, forward 24%, backward 32%, optimizer 8%, other 4% · 1 GiB · CPU 1.9 cores",
        " ! the model waits for data: 34% of a step",
    ]


def test_without_findings_it_has_two_lines() -> None:
    assert len(panel_lines(view(), 200)) == 2
    assert panel_lines(view(steps=0), 200) == [" flatout · waiting for the first step"]


def test_what_is_not_in_force_of_a_plan_is_said() -> None:
    assert panel_lines(view(notes=("rolled back torch.compile: it failed", "left off x: y")), 200)[-1] == (
        " ! rolled back torch.compile: it failed (and 1 more)"
    )


def test_the_share_of_the_ceiling_where_it_was_measured() -> None:
    shown = LiveView(state=run_state(), clock_seconds=1100.0, ceilings=CEILINGS)
    assert " ceiling" in panel_lines(shown, 300)[0]
    assert "ceiling" not in panel_lines(view(), 300)[0]


def test_a_narrow_terminal_gets_whole_parts() -> None:
    for columns in range(20, 120):
        for line in panel_lines(view(findings=(FINDING,)), columns):
            assert cells(line) <= columns
    assert panel_lines(view(), 40)[0] == " flatout · step 1,234 · 12.5 ms"


def test_one_line_where_there_is_room_for_one() -> None:
    line = panel_lines(view(findings=(FINDING,)), 200, 1)[0]
    assert line.startswith(" flatout · step 1,234 · 12.5 ms · ")
    assert line.endswith(" · 1 GiB · the model waits for data: 34% of a step")
    assert panel_lines(view(steps=0), 200, 1)[0] == " flatout · waiting for the first step"


def test_a_step_that_does_not_end_is_said() -> None:
    assert "last step 42 s ago" in panel_lines(view(clock=1142.0), 200)[0]
    assert "ago" not in panel_lines(view(clock=1104.0), 200)[0]
    assert "ago" not in panel_lines(view(clock=1142.0, step_seconds=60.0), 200)[0]


def test_a_clock_that_jumped_makes_no_negative_times() -> None:
    shown = LiveView(state=run_state(last_step_clock=2000.0, written_clock=2000.0), clock_seconds=1000.0)
    assert not any("-" in line for line in panel_lines(shown, 300))
    assert dict(live_rows(shown))["script"].endswith("for 1 min 40 s")


def test_a_gpu_in_the_panel() -> None:
    energy = Energy(of_what="GPU 0", joules_per_step=8.0, joules_per_sample=0.25)
    line = panel_lines(view(on_gpu(throttled=("power limit",)), energy, **ON_GPU), 300)[1]
    assert line.endswith(
        " · GPU 0 · 98% busy · 1.75 GHz of 1.98 GHz · 612 of 700 W · 61 °C · 8 GiB of 80 GiB"
        " · held back by: power limit · 250 mJ a sample"
    )


def test_epochs() -> None:
    def shown(epoch: Epoch | None) -> str:
        return dict(live_rows(view(epoch=epoch, epoch_unknown_because="no DataLoader feeds training")))["progress"]

    assert shown(None) == "step 1,234 · epochs unknown: no DataLoader feeds training"
    known = Epoch(number=1, steps_done=4, steps_total=None, total_unknown_because="too few steps yet", seconds=1.0)
    assert shown(known) == "step 1,234 · epoch 1, step 4 of it · its length is unknown: too few steps yet"
    beyond = Epoch(number=2, steps_done=41, steps_total=40, seconds=1.0)
    assert shown(beyond) == "step 1,234 · epoch 2, step 41 of it"


@pytest.mark.parametrize(
    ("condition", "changes", "said"),
    [
        ("running", {}, "process "),
        ("stopped", {}, "stopped, process "),
        ("ended", {"ended": True, "status": 3}, "ended at 20"),
        ("killed", {}, "is gone and wrote no end: killed after 20"),
        ("unknown", {}, "of another container"),
    ],
)
def test_conditions(condition: Any, changes: dict[str, Any], said: str) -> None:
    shown = LiveView(state=run_state(**changes), condition=condition, clock_seconds=1100.0)
    assert said in dict(live_rows(shown))["script"]


def test_rows_say_why_something_is_unknown() -> None:
    devices = Devices(reading=reading(4.0, unknown={"energy_joules": "only root may read it"}), seconds=4.0)
    energy = Energy(of_what="the processor", unknown_because="only root may read it")
    rows = live_rows(
        view(devices, energy, flops_per_step=None, flops_unknown_because="too short", samples_per_step=None)
    )
    found = dict(rows)
    assert found["ceiling"] == "unknown: too short"
    assert found["energy"] == "unknown: only root may read it"
    assert "power unknown: only root may read it" in found["CPU"]
    assert "samples/s unknown" in found["step"]


def test_energy() -> None:
    rows = dict(live_rows(view(energy=Energy(of_what="GPU 0", joules_per_step=8.0, joules_per_sample=0.00025))))
    assert rows["energy"] == "250 µJ a sample · 8 J a step · of GPU 0 as a whole, whoever used it"
    part = Energy(of_what="GPU 0", joules_per_step=2500.0, unknown_because="several loaders")
    assert dict(live_rows(view(energy=part)))["energy"].startswith("2.5 kJ a step · a sample unknown: several loaders")


def test_devices_and_their_processes() -> None:
    processes = (
        GpuProcess(pid=7, name="python", memory_bytes=1 << 30),
        GpuProcess(pid=8, name=None, memory_bytes=None),
    )
    refused = {"busy_share": "Not Supported"}
    rows = devices_rows(on_gpu(processes=processes, busy_share=None, unknown=refused))
    assert ("", "process 7 python: 1 GiB") in rows
    assert ("", "process 8 (of another user or container): memory unknown") in rows
    assert "use unknown: Not Supported" in dict(rows)["GPU 0"]
    assert dict(devices_rows(Devices(reading=reading(), seconds=0.0)))["GPU"] == "no NVIDIA driver is installed"


def test_control_codes_and_wide_letters() -> None:
    assert printable(HOSTILE) == "<script>alert(1)</script><img src=x onerror=alert(2)>]0;owned.py"
    assert printable("a\u202eb\x9b2J\r\nc") == "ab2Jc"
    assert fitted("漢字漢字", 5) == "漢字"
    assert fitted("e\u0301" * 4, 4) == "e\u0301" * 4
    assert cells("漢e\u0301") == 3
