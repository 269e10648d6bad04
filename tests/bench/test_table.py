"""The table: who takes part, in which setting, what is compared, and what becomes of contenders that cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.bench import table
from flatout.bench.process import NotInstalled, Ready
from flatout.bench.results import BenchResult, Row
from flatout.bench.table import QUICK, WORKLOADS, Effort, difference, measure_table
from flatout.bench.workload import Contender, Found, Settings, Setup, Workload
from flatout.errors import TrialError
from flatout.machine.description import Machine
from flatout.report.bench_text import bench_text

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded/machine_two_cores.json").read_text()))
CPU = Setup(device="cpu")


class Scripted:
    """In place of a process: `how` names what it does."""

    process_id = 0
    closed: list[str] = []  # noqa: RUF012

    def __init__(self, prepare: Callable[[], Mapping[str, Any]], setup: Setup, settings: Settings) -> None:
        self._does = {**prepare(), **settings}
        self._turns = 0

    def wait_until_ready(self) -> Ready:
        if self._does.get("missing"):
            raise NotInstalled("No module named 'peer'")
        if self._does.get("breaks"):
            raise TrialError("ValueError: broken")
        return Ready(how=str(self._does["how"]), first_seconds=2.0)

    def turn(self) -> tuple[float, float | None]:
        self._turns += 1
        if self._does.get("breaks_in_turns"):
            raise TrialError("RuntimeError: in a turn")
        if self._turns > self._does.get("lives", 1000):
            raise TrialError("its process ended by SIGKILL (too little memory?)")
        return float(self._does["seconds"]), self._does.get("loss")

    def flops(self) -> float | None:
        return 1e9

    def outputs(self) -> list[float] | None:
        found: list[float] | None = self._does.get("outputs")
        return found

    def peak_bytes(self) -> int | None:
        return 1 << 30

    def close(self) -> None:
        self.closed.append(str(self._does["how"]))


def contender(name: str, role: Any = "peer", grid: Sequence[Settings] = ({},), **does: Any) -> Contender:
    return Contender(
        name=name,
        role=role,
        prepare=lambda: {"how": name, "seconds": 1.0, **does},  # type: ignore[arg-type, misc, return-value]
        grid=lambda setup: grid,
    )


def workload(*contenders: Contender, **changed: Any) -> Workload:
    given: dict[str, Any] = {
        "key": "work",
        "title": "Work",
        "unit": "items",
        "guides": "100 items/s",
        "size": lambda setup: "10 items",
        "items": lambda setup: 10,
        "contenders": contenders,
        **changed,
    }
    return Workload(**given)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ContenderProcess", Scripted)
    monkeypatch.setattr(table, "machine_with_ceilings", lambda progress: MACHINE)
    monkeypatch.setattr(Scripted, "closed", [])


def measured(*contenders: Contender, **changed: Any) -> BenchResult:
    effort = Effort(rounds=8, tune_seconds=1.0)
    return measure_table([workload(*contenders, **changed)], CPU, effort, lambda text: None)


def test_a_peer_takes_part_in_its_fastest_setting() -> None:
    broken = [{"how": "broken", "breaks": True}, {"how": "stops", "breaks_in_turns": True}]
    grid = [{"how": "slow", "seconds": 0.9}, *broken, {"how": "fast", "seconds": 0.5}]
    (found,) = measured(
        contender("plain torch", "plain"), contender("Peer", grid=grid), contender("flatout", "flatout", seconds=0.25)
    ).workloads
    assert [(row.name, row.how) for row in found.rows] == [
        ("plain torch", "plain torch"),
        ("Peer", "fast"),
        ("flatout", "flatout"),
    ]
    assert [(one.how, one.seconds) for one in found.tried if not one.reason] == [("slow", 0.9), ("fast", 0.5)]
    assert [one.reason for one in found.tried if one.reason] == ["ValueError: broken", "RuntimeError: in a turn"]
    against = found.against_peer()
    assert against is not None
    assert against.ratio == pytest.approx(2.0)
    assert against.pairs == 8


def test_what_cannot_run_has_a_reason_and_the_others_go_on() -> None:
    (found,) = measured(
        contender("plain torch", "plain"),
        contender("Missing", missing=True),
        contender("Broken", breaks=True),
        contender("Dies", lives=3),
    ).workloads
    assert [row.name for row in found.rows] == ["plain torch"]
    assert len(found.rows[0].seconds) == 8
    assert found.left_out == {
        "Missing": "not installed (No module named 'peer')",
        "Broken": "ValueError: broken",
        "Dies": "its process ended by SIGKILL (too little memory?)",
    }
    assert found.against_peer() is None
    assert {"plain torch", "Dies"} <= set(Scripted.closed)


def test_too_little_memory_leaves_a_contender_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "available_memory_bytes", lambda: 1 << 20)
    run = table._Run(workload(contender("plain torch", "plain")), CPU, Effort(rounds=1, tune_seconds=1.0), print)
    run.largest_bytes = 1 << 30
    assert run.measure().left_out == {"plain torch": "1 MiB of memory are left; another contender took 1 GiB"}


def test_so_it_does_where_all_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "available_memory_bytes", lambda: 1 << 20)
    contenders = workload(contender("plain torch", "plain"), contender("other", "plain"))
    run = table._Run(contenders, replace(CPU, quick=True), Effort(rounds=1, tune_seconds=1.0), print)
    run.largest_bytes = 1 << 30
    assert {*run.measure().left_out} == {"plain torch", "other"}


def test_flatout_runs_what_its_search_found_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_child(function: Callable[..., Any], *arguments: object) -> Any:
        return function(*arguments)

    monkeypatch.setattr(table, "in_child", in_child)
    found_plan = Found(settings={"how": "bf16", "seconds": 0.2}, note="tuned in 3 s")

    def failing(setup: Setup, seconds: float) -> Found:
        raise TrialError("nothing of the budget is left")

    ours = Contender(
        name="flatout",
        role="flatout",
        prepare=contender("flatout").prepare,
        search=lambda setup, seconds: found_plan,
    )
    other = Contender(name="other", role="flatout", prepare=contender("other").prepare, search=failing)
    (found,) = measured(contender("plain torch", "plain"), ours, other).workloads
    assert found.row("flatout").how == "bf16, tuned in 3 s"
    assert found.left_out == {"other": "nothing of the budget is left"}


def test_fewer_bits_are_not_compared_with_peers() -> None:
    exact = contender("flatout", "flatout", seconds=0.5)
    fewer = Contender(
        name="flatout, int8",
        role="flatout",
        prepare=contender("int8", seconds=0.1).prepare,
        other_numbers="weights of 8 bits",
    )
    found = measured(contender("plain torch", "plain"), contender("Peer"), exact, fewer)
    ours = found.workloads[0].ours()
    assert ours is not None
    assert ours.name == "flatout"
    assert "flatout, int8 has other numbers: weights of 8 bits" in bench_text(found)


def test_differences_are_those_of_outputs_from_the_plain_ones() -> None:
    contenders = contender("plain torch", "plain", outputs=[3.0, 4.0]), contender("Peer", outputs=[3.0, 4.5])
    (found,) = measured(*contenders, compared="values").workloads
    assert [row.difference for row in found.rows] == [None, pytest.approx(0.1)]
    assert difference([1, 2, 3, 4], [1, 2, 9, 9], tokens=True) == 0.5
    assert difference([1.0], [1.0, 2.0], tokens=False) is None
    assert difference([0.0], [1.0], tokens=False) is None


def test_a_result_comes_back_from_json_and_reads_the_same() -> None:
    found = measured(
        contender("plain torch", "plain", loss=2.5), contender("Peer", missing=True), flops_of="plain torch"
    )
    again = BenchResult.from_json(json.loads(json.dumps(found.to_json())))
    assert bench_text(again) == bench_text(found)
    assert again.workloads == found.workloads
    assert again.workloads[0].rows[0].losses == (2.5,) * 8
    with pytest.raises(TypeError, match="missing"):
        BenchResult.from_json({**found.to_json(), "workloads": [{}]})
    document = json.loads(json.dumps(found.to_json()))
    document["workloads"][0]["rows"][0]["seconds"] = [0.0]
    with pytest.raises(TypeError, match="plain torch has no times above 0"):
        BenchResult.from_json(document)


def test_the_text_says_who_is_how_fast() -> None:
    found = measured(
        contender("plain torch", "plain"),
        contender("Peer", seconds=0.5),
        contender("flatout", "flatout", seconds=0.25),
        contender("Gone", missing=True),
        flops_of="plain torch",
    )
    text = bench_text(found)
    assert "Work: 10 items" in text
    assert "x4.00 (4.00 to 4.00)" in text
    assert "flatout against the fastest peer (Peer): x2.00 (2.00 to 2.00)" in text
    assert "left out  Gone: not installed (No module named 'peer')" in text
    assert "guides    100 items/s" in text
    bars = [line.count("█") for line in text.splitlines() if "█" in line]
    assert bars == [4, 8, 16]


def test_a_share_of_another_device_s_ceiling_is_unknown() -> None:
    found = measured(contender("plain torch", "plain"), flops_of="plain torch")
    (work,) = found.workloads
    on_gpu = BenchResult(**{**vars(found), "device": "cuda"})
    assert on_gpu.share_of_ceiling(work, work.rows[0]) is None


def test_quick_rounds_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(rounds=1000, tune_seconds=1.0, most_seconds=0.0)
    (found,) = measure_table([workload(contender("plain torch", "plain"))], CPU, effort, lambda text: None).workloads
    assert len(found.rows[0].seconds) == table.LEAST_ROUNDS


# the real workloads


def test_every_workload_has_a_plain_contender_and_one_of_ours() -> None:
    assert set(QUICK) <= set(WORKLOADS)
    for key, one in WORKLOADS.items():
        assert one.key == key
        roles = [other.role for other in one.contenders]
        assert roles.count("plain") == 1
        assert "flatout" in roles
        assert one.flops_of in (None, *(other.name for other in one.contenders))
        for setup in (CPU, Setup(device="cpu", quick=True), Setup(device="cuda")):
            assert one.items(setup) > 0
            assert one.size(setup)
            assert all(other.grid(setup) for other in one.contenders)


def test_the_smallest_workload_trains_the_same_way_with_each_contender() -> None:
    from flatout.bench.training import SMALL
    from flatout.plan import Plan

    plain, ours = (WORKLOADS["compile"].contender(name) for name in ("plain torch", "flatout, tuned"))
    settings = {"plan": Plan(optimizer="fused").to_toml()}
    assert SMALL.exactness == "rounding"
    runs = [plain.prepare(CPU, {}), ours.prepare(CPU, settings)]
    assert [run.how for run in runs] == ["fp32", "fused optimizer"]
    first, second = ([run.turn() for _ in range(2)] for run in runs)
    assert first == pytest.approx(second, rel=1e-5)
    flops = runs[0].flops()
    assert flops is not None
    assert flops > 1e9


def test_rows_keep_their_median() -> None:
    row = Row(name="a", role="plain", how="", seconds=(3.0, 1.0, 2.0), first_seconds=1.0, peak_bytes=None)
    assert row.median_seconds == 2.0
