import json
from pathlib import Path

import pytest

from flatout.__main__ import main as run_flatout
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


NET = """import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(3)]
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def make():
    print("building")
    return Net()
def fails():
    raise RuntimeError("no weights")
def lazy():
    return nn.LazyLinear(3)
class Unbegun(nn.Module):
    def __init__(self):
        self.width = 3
class Unhashable(nn.Linear):
    __hash__ = None
    def __init__(self):
        super().__init__(2, 2)
def writes():
    import os
    os.write(1, b"building in C")
    return nn.Linear(2, 2)
class Mute(Exception):
    def __str__(self):
        raise ValueError
class Cancelled(BaseException):
    pass
def mute():
    raise Mute
def cancelled():
    raise Cancelled("too late")
def paints():
    raise RuntimeError("\\x1b[31mred\\x07\\r")
class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.kept = nn.Linear(2, 2), [Unbegun.__new__(Unbegun)]
class Lazily:
    @property
    def net(self):
        raise OSError("no disk")
lazily = Lazily()
fine = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
number = 3
"""


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


@pytest.mark.usefixtures("net")
def test_a_model_is_checked_without_being_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "net.py:make"]) == 2
    shown = capsys.readouterr()
    assert "Net (net.py:make) · 0 parameters" in shown.out
    assert "net.py:6  self.layers = [nn.Linear(8, 8) for _ in range(3)]" in shown.out
    assert "building" in shown.err
    assert main(["check", "net.py:fine"]) == 0
    assert "fine (built, not run)" in capsys.readouterr().out


@pytest.mark.usefixtures("net")
def test_a_checked_model_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "net.py:make", "--json"]) == 2
    doc = json.loads(capsys.readouterr().out)
    assert doc["flatout"]["document"] == "model-check"
    assert doc["model"]["unregistered"][0]["parameters"] == 3 * 72
    assert [one["name"] for one in doc["findings"]] == ["unregistered-modules"]


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("net.py", "name the object after a colon, as in net.py:"),
        ("missing.py:make", "missing.py"),
        ("./missing", "there is no such file or folder in "),
        ("net.py:mak", "make"),
        ("net.py:number", "number"),
        ("net.py:fails", "no weights"),
        ("net.py:lazy", "no shape yet"),
        ("net.py:mute", "raise Mute: Mute; make it work in plain Python first"),
        ("net.py:cancelled", "Cancelled: too late; make it work in plain Python first"),
        ("net.py:lazily.net", "reading lazily.net of net.py failed at net.py, line"),
        ("net.py:Unbegun", "the __init__ of Unbegun does not call super().__init__(); call it first"),
        ("net.py:Unhashable", "unhashable type: 'Unhashable'; make list(model.parameters()) work in plain Python"),
    ],
)
def test_what_is_no_model_is_refused(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as refused:
        main(["check", model])
    assert said in str(refused.value)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("net")
def test_what_a_model_raises_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_flatout(["check", "net.py:paints"]) == 2
    said = capsys.readouterr().err
    assert r"RuntimeError: \x1b[31mred\x07\r; make it work" in said
    assert all(line.isprintable() for line in said.split("\n"))


@pytest.mark.usefixtures("net")
def test_what_is_written_past_python_is_no_part_of_the_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "net.py:writes", "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["model"]["kind"] == "Linear"
    assert "building in C" in shown.err


@pytest.mark.usefixtures("net")
def test_a_module_in_a_list_that_never_began_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "net.py:Kept"]) == 0
    assert "fine (built, not run)" in capsys.readouterr().out


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize("options", [["--measure"], ["--forget-tunes"], ["--install", "pip"]])
def test_a_model_is_checked_apart_from_the_machine(options: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{options[0]} applies only to the machine"):
        main(["check", "net.py:fine", *options])
