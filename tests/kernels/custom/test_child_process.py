"""The process that runs the user's code: its death, its silence and its mistakes are told, and survived."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import flatout
from flatout.errors import UsageError
from flatout.kernels.custom import parent

HEAD = """
import os, time, ctypes, torch
def reference(x): return 2 * x
inputs, dtypes, layouts = ("float[n]",), "float32", "contiguous"
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def checked(folder: Path, text: str, **options: object) -> flatout.kernels.KernelCheck:
    file = folder / "kernel_of_test.py"
    file.write_text(HEAD + text)
    settings = {"quick": True, "timing": False, "device": "cpu", **options}
    return flatout.kernels.check(file, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_crash_is_told_with_its_line_and_the_smallest_case(tmp_path: Path) -> None:
    text = "def kernel(x):\n    if len(x) > 6:\n        ctypes.string_at(8)\n    return 2 * x\n"
    told: list[str] = []
    found = checked(tmp_path, text, progress=told.append)
    assert [one.name for one in found.failures] == ["forward"]
    failure = found.failures[0].failure
    assert failure is not None
    assert failure.what == "crashes with SIGSEGV at kernel_of_test.py, line 7"
    assert failure.case == "n=7, float32"
    assert failure.reproduce.startswith("torch.manual_seed(")
    assert found.speed_reason == "the check did not get that far"
    assert any(text.startswith("forward: n=") for text in told)


@pytest.mark.slow
def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "NARROWINGS", 0)
    monkeypatch.setattr(parent, "HANG_SECONDS", 1.0)
    text = "def kernel(x):\n    while len(x) == 9: time.sleep(0.01)\n    return 2 * x\n"
    (failed,) = checked(tmp_path, text, call_seconds=10.0).failures
    assert failed.failure is not None
    assert (failed.failure.what, failed.failure.case) == ("hangs: no end after 10 s", "n=9, float32")


@pytest.mark.slow
def test_a_kernel_that_ends_the_process(tmp_path: Path) -> None:
    (failed,) = checked(
        tmp_path, "def kernel(x):\n    os._exit(7) if len(x) == 3 else None\n    return 2 * x\n"
    ).failures
    assert failed.failure is not None
    assert failed.failure.what == "ends the process with exit code 7"


@pytest.mark.slow
def test_what_is_printed_and_what_is_wrong_in_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = checked(tmp_path, "print('hello')\ndef kernel(x):\n    print('called')\n    return 2 * x\n")
    assert found.ok
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UsageError, match="has no kernel"):
        checked(tmp_path, "")


@pytest.mark.slow
def test_a_file_that_waits_for_a_lock_that_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(parent, "LOCK_SECONDS", 5.0)
    lock = tmp_path / "waiting" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 7200,) * 2)
    text = "while os.path.exists(os.environ['TORCH_EXTENSIONS_DIR'] + '/waiting/lock'): time.sleep(0.1)\n"
    (failed,) = checked(tmp_path, text).failures
    assert failed.failure is not None
    assert f"waits for {lock}, left 2 h 0 min ago by a build that was killed; remove that file" in failed.failure.what


def test_arguments_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        flatout.kernels.check(tmp_path / "nothing.py")
    (tmp_path / "a.py").write_text("open('ran', 'w').close()\n")
    for option in ({"seed": -1}, {"cases": 1.5}, {"call_seconds": 0}, {"device": "cuda:99"}):
        with pytest.raises(UsageError):
            flatout.kernels.check(tmp_path / "a.py", **option)  # type: ignore[arg-type]
    assert not (tmp_path / "ran").exists()
