import json
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.errors import UsageError
from flatout.machine import detect
from flatout.machine.ceilings import Ceilings
from flatout.machine.description import Machine

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def recorded_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(machine: Machine, **_: object) -> Ceilings:
        return Ceilings.from_json({**RECORDED["ceilings"], "device": "cuda:0" if machine.usable_gpus else "cpu"})

    monkeypatch.setattr("flatout.application.check.measure_ceilings", measure)


def test_check_prints_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--json"])
    shown = capsys.readouterr()
    doc = json.loads(shown.out)
    assert doc["flatout"]["document"] == "check"
    assert code == (2 if any(f["severity"] == "warning" for f in doc["findings"]) else 0)
    assert doc["machine"]["ceilings"] is None
    assert shown.err == ""


@pytest.mark.usefixtures("recorded_ceilings")
def test_what_was_measured_is_kept_for_the_next_time(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--measure", "--quick"])
    assert "fp32 product" in capsys.readouterr().out
    main(["check"])
    assert "fp32 product" in capsys.readouterr().out


@pytest.mark.usefixtures("recorded_ceilings")
def test_a_cache_that_cannot_be_written_spoils_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "file"))
    main(["check", "--measure", "--json"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["machine"]["ceilings"] is not None
    assert "cannot keep the ceilings" in shown.err


def test_what_earlier_tunes_measured_is_deleted_on_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "tunes.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    main(["check", "--json", "--forget-tunes"])
    shown = capsys.readouterr()
    assert not kept.exists()
    assert shown.err == f"deleted {kept}\n"
    assert json.loads(shown.out)["flatout"]["document"] == "check"
    main(["check", "--forget-tunes"])
    assert capsys.readouterr().err == "no earlier tunes were kept\n"


def test_quick_alone_means_nothing() -> None:
    with pytest.raises(UsageError, match="pass --measure too"):
        main(["check", "--quick"])


def test_the_lines_that_install_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda: Machine.from_json(RECORDED))
    assert main(["check", "--install", "pip", "--torch", "2.11.0", "--json"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert doc["flatout"]["document"] == "install"
    assert main(["check", "--install", "pip", "--torch", "2.11.0"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert commands == doc["lines"]
    assert main(["check", "--install", "conda", "--torch", "1.0"]) == 1
    assert capsys.readouterr().out.startswith("# torch 1.0: unknown, because ")
    with pytest.raises(UsageError, match="--install pip"):
        main(["check", "--torch", "2.11.0"])
