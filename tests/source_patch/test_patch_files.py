"""The patch is a file that `patch -p1` and `git apply` take, whatever the script's bytes and name are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flatout.errors import ScriptError
from flatout.plan import Plan
from flatout.report.source_patch_text import comment_lines, patch_bytes
from flatout.script.entry import Target
from flatout.source_patch.unified_diff import hunks, quoted
from flatout.statistics import Comparison
from tests.source_patch.patching import applied, changed_lines, patch_for, patch_of_target
from tests.source_patch.test_forms import EPOCHS, PLAIN

ALL = {"threads": 1, "optimizer": "fused", "precision": "bf16", "compile": "default"}
TOOLS = ["patch", "git"]

SCRIPTS = {
    "plain": PLAIN.encode(),
    "functions": EPOCHS.encode(),
    "carriage returns": PLAIN.replace("\n", "\r\n").encode(),
    "tabs": EPOCHS.replace("    ", "\t").encode(),
    "two spaces": EPOCHS.replace("    ", "  ").encode(),
    "no last newline": PLAIN.rstrip().encode(),
    "not ASCII": PLAIN.replace("import torch\n", "# größe: ≤ 3\nimport torch\n").encode(),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "latin-1": b"# -*- coding: latin-1 -*-\n# gr\xf6\xdfe\n" + PLAIN.encode(),
    "form feed": PLAIN.replace("\nmodel", "\n\x0c\nmodel").encode(),
    "a long string": PLAIN.replace("torch.zeros(8, 2))", "torch.zeros(8, len('''a\n  b''')))").encode(),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_it_applies_and_compiles(tmp_path: Path, kind: str, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    patch = patch_for(tmp_path, SCRIPTS[kind], **ALL)
    assert patch.left == ()
    applied(tmp_path, patch, tool)
    content = (tmp_path / "train.py").read_bytes()
    assert content == patch.files[0].content
    compile(content, "train.py", "exec", dont_inherit=True)
    assert b"fused=True" in content
    if kind == "carriage returns":
        assert content.count(b"\n") == content.count(b"\r\n")
    if kind == "tabs":
        assert b"    " not in content


NAMES = [
    "my train.py",
    "größe.py",
    'quo"te.py',
    "back\\slash.py",
    "tab\there.py",
    "-dash.py",
    "new\nline.py",
    "<b>&amp;.py",
]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_names(tmp_path: Path, name: str, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    if tool == "patch" and "\n" in name:
        pytest.skip("GNU patch refuses such names")
    path = tmp_path / name
    path.write_text(PLAIN)
    patch = patch_of_target(tmp_path, Target(path=f"./{name}"), optimizer="fused")
    text = patch_bytes(patch, [f"./{name}"])
    above = text.partition(b"\n--- ")[0].decode()
    assert all(line.startswith("#") for line in above.split("\n"))
    assert "\t" not in above
    applied(tmp_path, patch, tool)
    assert "fused=True" in path.read_text()


def test_names_are_quoted_as_git_does() -> None:
    assert quoted("a/b c.py") == b"a/b c.py\t"
    assert quoted('a/"\\\n.py') == b'"a/\\"\\\\\\012.py"'
    assert quoted("a/größe.py") == "a/größe.py".encode()
    assert quoted("a/\udcff.py") == b'"a/\\377.py"'


def test_hunks_name_the_choices_that_they_are_for(tmp_path: Path) -> None:
    patch = patch_for(tmp_path, EPOCHS, threads=1, optimizer="fused", precision="bf16")
    assert [hunk.choices for hunk in patch.files[0].hunks] == [("threads", "precision"), ("optimizer",)]
    headings = [line for line in patch_bytes(patch, ["train.py"]).decode().split("\n") if line.startswith("@@")]
    assert [line.partition("@@ ")[2].partition("@@ ")[2] for line in headings] == [
        *("threads = 1: gain unknown; precision = bf16: gain unknown", "optimizer = fused: gain unknown")
    ]


def test_hunks_of_changed_ends() -> None:
    (hunk,) = hunks(b"a\nb", b"a\nb\nc", [("x", 2, 2)])
    assert b"".join(hunk.lines) == b" a\n-b\n\\ No newline at end of file\n+b\n+c\n\\ No newline at end of file\n"
    assert (hunk.old_start, hunk.old_count, hunk.new_count, hunk.choices) == (0, 2, 3, ("x",))
    assert hunks(b"a\n", b"a\n", []) == ()


def report_of(plan: dict[str, object], *trials: dict[str, object], **more: object) -> dict[str, object]:
    return {"machine": {"fingerprint": "here"}, "plan": plan, "trials": list(trials), **more}


def kept(choices: dict[str, object], ratio: float) -> dict[str, object]:
    comparison = Comparison(
        ratio=ratio, low=ratio - 0.02, high=ratio + 0.02, confidence=0.95, pairs=9, verdict="faster"
    )
    return {"outcome": "kept", "choices": choices, "comparison": comparison.to_json()}


def test_each_change_has_the_gain_of_the_trial_that_kept_it(tmp_path: Path) -> None:
    plan = {"threads": 1, "optimizer": "fused", "attention": "fused"}
    report = report_of(
        plan,
        {"outcome": "dropped", "choices": {"optimizer": "foreach"}, "comparison": None},
        kept({"optimizer": "fused"}, 1.25),
        kept({"threads": 1, "attention": "fused"}, 1.1),
        speedup=kept({}, 1.4)["comparison"],
    )
    patch = patch_for(tmp_path, PLAIN, report=report, **plan)
    text = patch_bytes(patch, ["train.py", "--name", "two words"]).decode()
    assert "# the whole plan: x1.40 ±0.02\n" in text
    assert "#   optimizer = fused  x1.25 ±0.02\n" in text
    assert "#   threads = 1        x1.10 ±0.02 with attention\n" in text
    assert "#                      only under: flatout run train.py --name 'two words'\n" in text
    assert "@@ threads = 1: x1.10 +-0.02 with attention; optimizer = fused: x1.25 +-0.02\n" in text


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "nobody measured"),
        (report_of({"threads": 2}), "of another plan"),
        (report_of({"threads": 1}, sources=["sha256:1 train.py"]), "of another version of the script"),
        ({**report_of({"threads": 1}), "machine": {"fingerprint": "there"}}, "of another machine"),
        (report_of({"threads": 1}), "no trial in which it was kept"),
        (
            report_of({"threads": 1}, {"outcome": "kept", "choices": {"threads": 1}, "comparison": None}),
            "not timed by itself",
        ),
    ],
)
def test_an_unknown_gain_has_its_reason(tmp_path: Path, report: dict[str, object] | None, reason: str) -> None:
    known = {"machine_fingerprint": "here", "sources": ("sha256:0 train.py",)}
    patch = patch_for(tmp_path, PLAIN, report=report, threads=1, **known)
    assert patch.changes[0].gain.comparison is None
    assert f"gain unknown, because {patch.changes[0].gain.reason}" in "\n".join(comment_lines(patch, []))
    assert reason in patch.changes[0].gain.reason


def test_modules_of_the_script_are_patched_too(tmp_path: Path) -> None:
    """From the folder that holds them all."""
    package = tmp_path / "net"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text(
        "import torch\nfrom .parts import make\ndef train(data):\n    model, optimizer = make()\n    for x in data:\n"
        "        model.zero_grad()\n        loss = model(x).sum()\n        loss.backward()\n        optimizer.step()\n"
    )
    (package / "parts.py").write_text(
        "from torch import nn, optim\ndef make():\n    model = nn.Linear(2, 2)\n"
        "    return model, optim.Adam(model.parameters())\n"
    )
    (tmp_path / "start.py").write_text("from net.loop import train\ntrain([])\n")
    choices = {"optimizer": "fused", "compile": "default"}
    patch = patch_of_target(tmp_path, Target(path="start.py"), **choices)
    assert [file.name for file in patch.files] == ["net/parts.py", "net/loop.py"]
    applied(tmp_path, patch)
    assert "compiled_model(x).sum()" in (package / "loop.py").read_text()
    inside = patch_of_target(tmp_path, Target(module="net.loop"), **choices)
    assert [file.name for file in inside.files] == ["net/loop.py"]  # the other is patched already
    assert "sets fused itself" in inside.left[0].reason
    below = patch_of_target(package, Target(path="../start.py"), compile="default")
    assert below.folder == str(package) or below.folder == ""
    assert [file.name for file in below.files] == ["loop.py"]


def test_a_folder_elsewhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "train.py").write_text(PLAIN)
    patch = patch_of_target(tmp_path / "here", Target(path="../train.py"), threads=1)
    assert patch.folder == str(tmp_path)
    assert patch.files[0].name == "train.py"
    assert f"to be applied in {tmp_path}" in comment_lines(patch, [])


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"train.py could not be parsed"):
        patch_for(tmp_path, "x = = 1\n", threads=1)


def test_the_patch_of_a_plan_without_a_form_is_empty(tmp_path: Path) -> None:
    patch = patch_for(tmp_path, PLAIN, allocator="retain")
    assert (patch.files, changed_lines(patch)) == ((), "")
    assert Plan(allocator="retain").choices() == {"allocator": "retain"}
    text = patch_bytes(patch, ["train.py"]).decode()
    assert "the same with: MALLOC_MMAP_MAX_=0" in text
    assert "python train.py" in text
