"""flatout bench: what it prints and saves, and every slip at the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main
from flatout.bench import claims, table
from flatout.bench.claim import Claim, ClaimsResult
from flatout.bench.results import BenchResult, Row, WorkloadResult
from flatout.bench.table import Effort
from flatout.bench.workload import Setup, Workload
from flatout.machine.description import Machine

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded/machine_two_cores.json").read_text()))


def a_row(name: str, role: Any, seconds: float) -> Row:
    return Row(name=name, role=role, how="fp32", seconds=(seconds,) * 8, first_seconds=1.0, peak_bytes=1 << 30)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have been measured; nothing is."""
    seen: dict[str, Any] = {}
    common = {"machine": MACHINE, "versions": {"torch": "2.13.0"}, "contended": False}

    def measure_table(workloads: Sequence[Workload], setup: Setup, effort: Effort, progress: Any) -> BenchResult:
        seen.update(keys=[one.key for one in workloads], setup=setup, effort=effort)
        rows = (a_row("plain torch", "plain", 2.0), a_row("flatout, tuned", "flatout", 1.0))
        results = [
            WorkloadResult(
                key=one.key,
                title=one.title,
                unit=one.unit,
                size=one.size(setup),
                items=one.items(setup),
                guides=one.guides,
                compared=one.compared,
                flops=None,
                rows=rows,
                left_out={},
            )
            for one in workloads
        ]
        return BenchResult(device=setup.device, quick=setup.quick, workloads=tuple(results), **common)

    def measure_claims(given: Sequence[Claim], setup: Setup, seconds: float, progress: Any) -> ClaimsResult:
        seen.update(claims=[one.key for one in given], seconds=seconds)
        results = tuple(claims._result(one, "it needs a GPU, and torch sees none") for one in given)
        return ClaimsResult(device=setup.device, quick=setup.quick, claims=results, **common)

    monkeypatch.setattr(table, "measure_table", measure_table)
    monkeypatch.setattr(claims, "measure_claims", measure_claims)
    return seen


def test_the_table_is_printed_saved_and_shown_again(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "table.json"
    assert main(["bench", "--device", "cpu", "--only", "resnet50,compile", "--out", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "ResNet-50 training: 16 images of 224 x 224 a step" in shown
    assert asked["keys"] == ["resnet50-training", "compile"]
    assert (asked["effort"].rounds, asked["effort"].tune_seconds) == (12, 300.0)
    assert main(["bench", "show", str(saved)]) == 0
    assert capsys.readouterr().out == shown


def test_quick_takes_the_guides_workloads_in_small(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--quick", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["flatout"]["document"] == "bench"
    assert asked["setup"] == Setup(device="cpu", quick=True)
    assert "gpt2-training" not in asked["keys"]
    assert asked["effort"].most_seconds < 60
    assert main(["bench", "--rounds", "3", "--budget", "90s", "--device", "cpu"]) == 0
    assert (asked["effort"].rounds, asked["effort"].tune_seconds) == (3, 90.0)
    assert "gpt2-training" in asked["keys"]


def test_claims_are_chosen_by_name_and_none_measured_is_a_failure(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "claims.json"
    assert main(["bench", "claims", "--only", "tf32,amp-m", "--device", "cpu", "--out", str(saved)]) == 1
    assert asked["claims"] == ["amp-memory", "tf32-3x"]
    assert "not measurable here   TF32" in capsys.readouterr().out
    assert main(["bench", "show", str(saved)]) == 0
    assert "2 claims: 2 cannot be measured here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tabel"], "it is one of table, claims, show"),
        (["show"], "nothing to show"),
        (["show", "no.json"], "cannot read no.json"),
        (["--budget", "0s"], "--budget is 0s; it is above 0"),
        (["table", "a.json"], "only 'show' takes files"),
        (["--only", "resnet51"], "--only 'resnet51'; there are resnet50-training"),
        (["--only", ","], "--only ','"),
        (["--rounds", "0"], "at least 1"),
        (["--budget", "soon"], "soon"),
        (["claims", "--rounds", "3"], "--rounds is for the table"),
        (["claims", "--budget", "3m"], "--budget is for the table"),
        (["--device", "cuda:9"], "cuda:9"),
        (["show", "a.json", "--json"], "--json with show"),
        (["show", "a.json", "--quick"], "--quick with show"),
        (["--out", "missing/table.json"], "there is no folder"),
    ],
)
def test_a_slip_is_explained(
    words: list[str], said: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""


def test_other_documents_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    other.write_text(json.dumps({"flatout": {"document": "run", "schema": 1}}))
    broken.write_text(json.dumps({"flatout": {"document": "bench", "schema": 1}, "workloads": 3}))
    nameless = tmp_path / "nameless.json"
    nameless.write_text(json.dumps({"flatout": {"schema": 1}}))
    assert main(["bench", "show", str(nameless)]) == 2
    assert "is a None document" in capsys.readouterr().err
    assert main(["bench", "show", str(other)]) == 2
    assert "is a 'run' document" in capsys.readouterr().err
    assert main(["bench", "show", str(broken)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_names_in_a_file_do_not_drive_the_terminal(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "table.json"
    assert main(["bench", "--device", "cpu", "--only", "resnet50", "--out", str(saved)]) == 0
    saved.write_text(saved.read_text().replace("ResNet-50 training", "ResNet\\u001b[2J-50 training"))
    capsys.readouterr()
    assert main(["bench", "show", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "ResNet[2J-50 training" in shown
    assert "\x1b" not in shown
