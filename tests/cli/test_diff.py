"""`flatout diff` as a user meets it: what it prints, what it refuses, and that it edits nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from flatout.__main__ import main
from flatout.plan import Plan, write_plan
from flatout.script.entry import Target
from flatout.script.own_files import source_digests
from tests.cli.in_process import said_by
from tests.source_patch.test_forms import PLAIN

REPORT = Path(__file__).parents[1] / "recorded" / "formats" / "tune-1.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PLAIN)
    write(tmp_path, optimizer="fused", threads=1)
    return tmp_path


def write(folder: Path, *, known: bool = True, script: str = "train.py", **choices: object) -> None:
    sources = source_digests(Target(path=str(folder / "train.py"))) if known else ()
    plan = Plan(script=script, sources=sources, loop="SGD over 2 tensors, on cpu", **choices)
    write_plan(folder / "flatout.toml", plan)


def test_a_patch_on_stdout(folder: Path) -> None:
    said = said_by(folder, "diff", "train.py")
    assert (said.returncode, said.stderr) == (0, "")
    assert (
        "--- a/train.py\n+++ b/train.py\n@@ -1,8 +1,10 @@ threads = 1: gain unknown; optimizer = fused: gain unknown\n"
        in said.stdout
    )
    assert "gain unknown, because there is no flatout-report.json beside the plan" in said.stdout
    assert (folder / "train.py").read_text() == PLAIN
    done = subprocess.run(["patch", "-p1"], cwd=folder, input=said.stdout, text=True, capture_output=True, check=True)
    assert "garbage" not in done.stdout
    assert "lr=0.1, fused=True)" in (folder / "train.py").read_text()


def test_a_patch_in_a_file(folder: Path) -> None:
    said = said_by(folder, "diff", "--out", "a.patch", "train.py")
    assert said.stdout == "saved a.patch      next: patch -p1 < a.patch\n"
    assert (folder / "a.patch").read_bytes().decode() == said_by(folder, "diff", "train.py").stdout


@pytest.mark.parametrize("out", ["train.py", "parts.py", "flatout.toml", "link.patch"])
def test_the_patch_replaces_nothing_that_it_is_made_of(folder: Path, out: str) -> None:
    (folder / "train.py").write_text(f"import parts\n{PLAIN}")
    (folder / "parts.py").write_text("x = 1\n")
    (folder / "link.patch").symlink_to("train.py")
    write(folder, optimizer="fused")
    before = (folder / out).read_bytes()
    said = said_by(folder, "diff", "--out", out, "train.py")
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        f"error: --out is {out}; the patch would replace a file that is only read; name another file\n"
    )
    assert (folder / out).read_bytes() == before


def test_one_document(folder: Path) -> None:
    said = said_by(folder, "diff", "--json", "train.py", "--epochs", "3")
    found = json.loads(said.stdout)
    assert found["flatout"]["document"] == "source patch"
    assert [one["choice"] for one in found["changes"]] == ["threads", "optimizer"]
    assert found["warnings"] == ["the plan was tuned with other arguments: tune again with these to be sure"]
    assert found["files"] == [{"name": "train.py", "hunks": 1}]
    assert found["patch"].startswith("# train.py as flatout tune measured it")


def test_a_plan_without_any_source_form(folder: Path) -> None:
    write(folder, allocator="retain")
    said = said_by(folder, "diff", "--out", "a.patch", "train.py", "--lr", "0.1")
    assert said.returncode == 1
    variables = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=67108864"
    variables += " GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    assert f"the same with: {variables} python train.py --lr 0.1" in said.stdout
    assert not (folder / "a.patch").exists()
    document = json.loads(said_by(folder, "diff", "--json", "train.py").stdout)
    assert document["patch"] is None


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing.py"], 2, "no such script: missing.py"),
        (["other.py"], 2, "flatout.toml is for train.py; name the plan of this script with --plan"),
        (["--plan", "flatout.toml", "loud.py"], 2, "flatout.toml is for train.py; loud.py has another source"),
        (["--plan", "none.toml", "train.py"], 2, "no plan at none.toml"),
        (["--report", "none.json", "train.py"], 2, "cannot read none.json"),
        (["--report", "flatout.toml", "train.py"], 2, "flatout.toml is not a JSON document"),
        (["--out", "nowhere/a.patch", "train.py"], 2, "cannot write nowhere/a.patch"),
        (["--loud", "train.py"], 2, "No such option"),
        (["syntax.py"], 1, "syntax.py, line 1: SyntaxError"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_input_is_named(folder: Path, words: list[str], code: int, said: str) -> None:
    (folder / "other.py").write_text(PLAIN)
    (folder / "loud.py").write_text(f"print('loud')\n{PLAIN}")
    (folder / "syntax.py").write_text("x = = 1\n")
    before = sorted(folder.iterdir())
    found = said_by(folder, "diff", *words)
    assert found.returncode == code, found.stderr
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""
    assert sorted(folder.iterdir()) == before


def test_a_script_that_changed_since_the_tune_is_refused(folder: Path) -> None:
    (folder / "train.py").write_text(PLAIN + "\n")
    said = said_by(folder, "diff", "train.py")
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        "error: train.py changed since the tune; the plan was measured and proved for what it was; "
        "tune again, or pass --force\n"
    )
    forced = said_by(folder, "diff", "--force", "train.py")
    assert forced.returncode == 0
    assert (
        "# note: train.py changed since the tune; the plan was measured and proved for what it was\n" in forced.stdout
    )


def test_a_plan_that_does_not_know_the_source_needs_force(folder: Path) -> None:
    write(folder, known=False, threads=1)
    said = said_by(folder, "diff", "train.py")
    assert said.returncode == 2
    assert "flatout.toml does not say which version of the source was tuned; it is from an older Flatout" in said.stderr
    assert said_by(folder, "diff", "--force", "train.py").returncode == 0


def test_without_libcst_the_line_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "libcst" else found(name, *rest)
    )
    said = said_by(folder, "diff", "train.py")
    assert said.returncode == 1
    assert said.stderr == ("error: libcst is not installed; flatout diff edits with it; pip install libcst\n")


def test_a_report_of_another_plan_gives_no_gain(folder: Path) -> None:
    (folder / "flatout-report.json").write_text(REPORT.read_text())
    said = said_by(folder, "diff", "train.py")
    assert said.returncode == 0
    assert "gain unknown, because the report beside the plan is of another plan" in said.stdout


def test_a_closed_stdout_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdout", None)
    assert main(["diff", "train.py"]) == 0
