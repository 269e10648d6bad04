"""`flatout memory` as a new user meets it: the report, the document, bad input, interruption, untouched files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.leaks.__main__ import marked_line, scripts
from flatout.private_details import arguments_digest
from tests.cli.in_process import Said, said_by

pytestmark = pytest.mark.usefixtures("forked_trials")

ROOT = Path(__file__).parents[2]
LOOP = """
import sys, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.Adam(model.parameters())
kept = []
for step in range({steps}):
    inputs = torch.randn(32, 64)
    out = model(inputs)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {body}
"""


def memory(folder: Path, *words: str, stdin: str | None = None) -> Said:
    return said_by(folder, "memory", *words, stdin=stdin)


def write(folder: Path, name: str, *, steps: int = 100_000, body: str = "pass") -> None:
    (folder / name).write_text(LOOP.format(steps=steps, body=body))


def document(result: Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["flatout"]["document"] == "memory"
    return found


def test_one_screen_says_peak_holders_savings_and_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # not forked: a whole start
    write(tmp_path, "train.py", body="kept.append(out); print('noise')")
    result = memory(tmp_path, "train.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert "noise" not in result.stdout.splitlines()
    assert "of tensors on cpu, in step 10" in result.stdout
    assert "optimizer state in bf16: 36.5 KiB less held" in result.stdout  # half of two moments of 9,352 floats
    assert "measure with flatout.forecast" in result.stdout
    assert "held by `kept` (list, " in result.stdout
    assert "entries, +1 a step): train.py:14  kept.append(out); print('noise')" in result.stdout
    assert "1 KiB of tensors a step" in result.stdout
    assert len(result.stdout.splitlines()) <= 40


def test_the_document_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    write(tmp_path, "train.py", body="print('noise')")
    result = memory(tmp_path, "--json", "--steps", "6", "train.py", "--its", "own")
    found = document(result)
    digest = arguments_digest(["--its", "own"])
    assert found["script"] == {"name": "train.py", "arguments": None, "arguments_digest": digest, "status": None}
    assert (found["steps"], found["step_kind"], found["leaks"]["verdict"]) == (8, "optimizer", "steady")
    peak = found["use"]["peak"]
    assert sum(peak["categories"].values()) == peak["size_bytes"]
    assert peak["categories"]["weights"] == 4 * 9352
    assert peak["categories"]["inputs"] == 4 * 32 * 64
    assert 2 * 4 * 9352 <= peak["categories"]["optimizer"] <= 2 * 4 * 9352 + 64  # and a counter each
    assert len(found["use"]["steps"]) == 8
    assert found["peak_resident_bytes"] > peak["size_bytes"]


def test_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    write(tmp_path, "train.py", body="open('log.txt', 'a').write('x'); open('new.txt', 'w')")
    (tmp_path / "log.txt").write_text("mine")
    assert memory(tmp_path, "train.py").returncode == 0
    assert (tmp_path / "log.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "train.py"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing.py"], 2, "no such script: missing.py"),
        (["-m", "no.such.module"], 1, "No module named"),
        (["--steps", "0", "train.py"], 2, "at least 1"),
        (["--isolation", "perhaps", "train.py"], 2, "not one of 'auto', 'overlay', 'guard'"),
        (["syntax.py"], 1, "syntax.py, line 2: SyntaxError"),
        (["raises.py"], 1, "ValueError: before any step"),
        (["usage.py"], 3, "usage: mine"),
        (["--isolation", "guard", "writes.py"], 1, "stopped before the script's first write"),
        ([], 2, "--help"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    write(tmp_path, "writes.py", body="open('x.txt', 'w')")
    (tmp_path / "syntax.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "raises.py").write_text("import torch\nraise ValueError('before any step')\n")
    (tmp_path / "usage.py").write_text("import sys\nsys.stderr.write('usage: mine')\nsys.exit(3)\n")
    before = sorted(tmp_path.iterdir())
    result = memory(tmp_path, *words)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "flatout/" not in result.stderr  # no traceback of ours
    assert sorted(tmp_path.iterdir()) == before


def test_a_script_that_fails_in_a_step_shows_its_traceback_and_what_was_seen(tmp_path: Path) -> None:
    write(tmp_path, "train.py", body="if step == 6: raise ValueError('at step 7')")
    result = memory(tmp_path, "--json", "train.py")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith("ValueError: at step 7\n")
    assert "flatout" not in result.stderr
    found = document(result)
    assert (found["steps"], found["script"]["status"]) == (7, 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_scaler_needs_all_gradients_at_once(tmp_path: Path, scaled: bool) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        f"scaler = torch.amp.GradScaler('cpu', enabled={scaled})\n"
        "while True:\n"
        "    optimizer.zero_grad()\n"
        "    scaler.scale(model(torch.ones(2, 64)).sum()).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    )
    result = memory(tmp_path, "train.py")
    assert result.returncode == 0
    assert ("gradients freed in the backward pass" in result.stdout) is not scaled


def test_that_torch_compile_compiles_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.compile(torch.nn.Linear(4, 1), backend='eager')\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    result = memory(tmp_path, "train.py")
    assert result.returncode == 0
    assert "torch.compile compiles nothing while memory is followed" in result.stdout


def test_without_steps_the_whole_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "infer.py").write_text("import torch\na = torch.zeros(1024)\nb = a + 1\n")
    result = memory(tmp_path, "infer.py")
    assert "no training step found: this is the whole run" in result.stdout
    assert "8 KiB of tensors on cpu, at infer.py:3 (add.Tensor)" in result.stdout


def test_weights_are_weights_in_evaluation_too(tmp_path: Path) -> None:
    model = "torch.nn.Sequential(torch.nn.Linear(64, 8))"
    (tmp_path / "infer.py").write_text(
        f"import torch\nmodel = {model}\nwith torch.no_grad():\n    out = model(torch.zeros(4, 64))\n"
    )
    result = memory(tmp_path, "infer.py")
    assert "weights 2.03 KiB" in result.stdout
    assert "of tensors on cpu, in 0 at infer.py:4 (addmm)" in result.stdout


def test_weights_of_a_teacher_that_does_not_train_are_weights(tmp_path: Path) -> None:
    teacher = "teacher = globals().setdefault('teacher', torch.nn.Linear(64, 8))"
    write(tmp_path, "train.py", steps=8, body=f"\n    with torch.no_grad(): {teacher}; teacher(inputs)")
    categories = document(memory(tmp_path, "--json", "train.py"))["use"]["peak"]["categories"]
    assert categories["weights"] == 4 * (64 * 128 + 128 + 128 * 8 + 8 + 64 * 8 + 8)


def test_without_torch_there_is_nothing_to_tell_and_none_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')\n")
    command = [sys.executable, "-X", "importtime", "-m", "flatout", "memory", "plain.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "it never imported torch" in done.stdout
    assert "flatout.report.memory_text" in imported
    assert not imported & {"torch", "numpy"}


def test_too_few_steps_give_no_verdict(tmp_path: Path) -> None:
    write(tmp_path, "train.py", steps=5, body="kept.append(out)")
    result = memory(tmp_path, "train.py")
    assert result.returncode == 0
    assert "unknown: 3 steps after the warm-up, and 5 are needed to tell" in result.stdout
    write(tmp_path, "train.py", steps=3)
    assert "unknown: 1 step after the warm-up, and 5 are needed to tell" in memory(tmp_path, "train.py").stdout


def test_a_module_of_a_package_and_what_is_piped_in(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    write(tmp_path, "package/train.py", body="kept.append(out) if sys.stdin.readline() else None")
    result = memory(tmp_path, "--json", "-m", "package.train", stdin="line\n" * 50)
    (leak,) = document(result)["leaks"]["leaks"]
    assert (leak["holder"], leak["line"]) == ("kept", "package/train.py:14")


def test_an_allocation_in_a_library_is_the_scripts_line(tmp_path: Path) -> None:
    library = tmp_path / "elsewhere" / "site-packages" / "library.py"
    library.parent.mkdir(parents=True)
    library.write_text("import torch\ndef noise(n):\n    return torch.randn(n, 64)\n")
    (tmp_path / "mine").mkdir()
    write(tmp_path, "mine/train.py", body="kept.append(noise(1024))")
    path = tmp_path / "mine" / "train.py"
    text = path.read_text().replace(
        "kept = []", f"sys.path.append({str(library.parent)!r})\nfrom library import noise\nkept = []"
    )
    path.write_text(text)
    (leak,) = document(memory(tmp_path, "--json", "mine/train.py"))["leaks"]["leaks"]
    assert leak["births"] == ["train.py:16"]
    assert leak["bytes_per_step"] == 4 * 1024 * 64


@pytest.mark.parametrize(
    "name", ["leaking/total_loss", pytest.param("leaking/kept_errors", marks=pytest.mark.slow), "clean/momentum"]
)
def test_planted_leaks_are_found_at_their_lines(name: str) -> None:
    (script,) = [one for one in scripts() if f"{one.parent.name}/{one.stem}" == name]
    found = document(memory(ROOT, "--json", str(script.relative_to(ROOT))))["leaks"]
    line = marked_line(script)
    wanted = [] if line is None else [f"{script.name}:{line}"]
    assert [leak["line"] for leak in found["leaks"]] == wanted


@pytest.mark.parametrize(
    ("body", "holder", "bounded"),
    [
        ("kept.append(out); kept.pop(0) if len(kept) > 50 else None", "kept", "the script also removes from it"),
        ("kept.append(out.item() if out.numel() == 1 else out.mean().item())", "", ""),
    ],
)
def test_what_the_script_gives_back_is_no_leak(tmp_path: Path, body: str, holder: str, bounded: str) -> None:
    write(tmp_path, "train.py", body=body)
    found = document(memory(tmp_path, "--json", "train.py"))["leaks"]
    assert (found["verdict"], found["leaks"]) == ("steady", [])
    assert [one["holder"] for one in found["bounded"]] == [holder] * bool(holder)
    assert all(bounded in one["bounded"] for one in found["bounded"])


def test_a_list_that_each_epoch_makes_anew_is_no_leak_unless_it_keeps_graphs(tmp_path: Path) -> None:
    text = LOOP.format(steps=100, body="kept.append(out.detach())").replace("kept = []\n", "")
    lines = text.partition("for step")
    loop = (lines[1] + lines[2]).replace("\n", "\n    ")
    epochs = f"{lines[0]}for epoch in range(50):\n    kept = []\n    {loop}"
    (tmp_path / "train.py").write_text(epochs)
    found = document(memory(tmp_path, "--json", "train.py"))["leaks"]
    assert (found["verdict"], found["leaks"]) == ("steady", [])
    (bounded,) = found["bounded"]
    assert bounded["bounded"] == "the script makes it anew or empties it: train.py:7  kept = []"
    (tmp_path / "train.py").write_text(epochs.replace(".detach()", ""))
    assert document(memory(tmp_path, "--json", "train.py"))["leaks"]["verdict"] == "leaks"


def test_cycles_that_only_wait_for_the_collector_are_no_leak(tmp_path: Path) -> None:
    body = "gone = type('Gone', (), {})(); gone.itself, gone.inputs = gone, inputs"
    write(tmp_path, "train.py", body=f"import gc; gc.disable(); {body}")
    found = document(memory(tmp_path, "--json", "train.py"))
    assert found["leaks"]["leaks"] == []
    assert found["leaks"]["waited_for_the_garbage_collector"] == ["train.py:8"]


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, b"interrupted\n"), (signal.SIGTERM, b""), (signal.SIGHUP, b"")]
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: int, said: bytes) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent("import time\nwhile True:\n    time.sleep(0.05)\n"))
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", "memory", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    try:
        while not (child := Path(children).read_text().split()):
            time.sleep(0.02)
        while "config.json" not in (command := Path(f"/proc/{child[0]}/cmdline").read_text().rstrip("\0")):
            time.sleep(0.02)  # between fork and exec
        folder = Path(next(word for word in command.split("\0") if word.endswith("config.json"))).parent
        os.killpg(process.pid, number)
        stdout, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (128 + number, b"", said)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    while _runs(child[0]):  # the alarm of every test ends a wait that is in vain
        time.sleep(0.05)
    assert not folder.exists()


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_script_that_leaves_without_pythons_own_end_is_told_of_with_its_code(tmp_path: Path) -> None:
    write(tmp_path, "leaves.py", steps=5, body="if step == 4: import os; os._exit(4)")
    result = memory(tmp_path, "leaves.py")
    assert (result.returncode, result.stderr) == (4, "")
    assert "the script exited on its own with code 4" in result.stdout


@pytest.mark.slow
def test_a_script_that_never_steps_is_ended_when_the_patience_is(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import sys, time, torch\nsys.stderr.write('its words')\ntime.sleep(1000)\n")
    result = memory(tmp_path, "--patience", "1s", "waits.py")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the script did not reach 8 steps in 1 s")
    assert "--patience 2h" in result.stderr


def test_a_patience_that_is_no_time_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    assert memory(tmp_path, "--patience", "soon", "train.py").returncode == 2


def test_what_a_killed_script_had_said_is_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        "killed.py",
        body="sys.stderr.write('its last words\\n'); sys.stderr.flush(); import os; os.kill(os.getpid(), 9)",
    )
    result = memory(tmp_path, "killed.py")
    assert result.returncode == 128 + signal.SIGKILL
    assert "SIGKILL" in result.stderr
    assert "its last words" in result.stderr


def test_the_guard_lets_an_optimizer_be_made(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    result = memory(tmp_path, "--isolation", "guard", "train.py")
    assert (result.returncode, result.stderr) == (0, "")


def test_lines_are_named_from_the_scripts_folder_as_in_a_profile(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "train.py", body="kept.append(out)\n    import os; os.chdir('/')")
    found = document(memory(tmp_path, "--json", "sub/train.py"))
    lines = {row["line"].partition(":")[0] for row in found["use"]["lines"]}
    assert lines == {"train.py"}
    assert found["leaks"]["leaks"][0]["line"] == "train.py:14"
