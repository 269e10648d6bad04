"""`flatout run` without a plan is not to be seen: odd scripts by Python alone and under it, without importing torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ODD = Path(__file__).parents[2] / "benchmarks" / "scripts" / "odd"


@pytest.mark.parametrize("name", ["interrupt_raised", "exit_handlers", "own_import_hook", "standard_library"])
def test_an_odd_script_is_the_same_program(name: str, run_both: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copy(ODD / f"{name}.py", tmp_path)
    pair = run_both([f"{name}.py"], options=("--no-report",))
    pair.assert_equal()
    assert pair.plain.returncode in (0, -2)
    if name == "interrupt_raised":  # written by the later of the two runs
        assert (tmp_path / "log.csv").read_text() == "epoch,loss\n1,0.5\n"


def test_a_module_of_the_scripts_own_may_be_called_torch(
    write: Callable[..., Path], run_both: Callable[..., Any]
) -> None:
    write("torch.py", "value = 3\n")
    report = write("train.py", "import torch; print(torch.value)\n").with_name("flatout-run.json")
    run_both(["train.py"]).assert_equal()
    assert report.is_file()


def test_modules_of_the_scripts_folder_win(write: Callable[..., Path], run_both: Callable[..., Any]) -> None:
    names = ("calendar", "csv", "difflib", "fractions", "json", "resource", "statistics", "psutil", "tomli_w")
    for name in names:
        write(f"{name}.py", "WHOSE = 'mine'")
    write(
        "train.py",
        f"""
        import sys
        standing = {{name for name in sys.modules if not name.startswith(("flatout", "pynvml", "importlib", "typing"))}}
        import {", ".join(names)}
        print([sys.modules[name].WHOSE for name in {names}])
        import dataclasses, inspect, threading, concurrent.futures
        print([name in standing for name in ("re", "typing", "dataclasses", "threading", "subprocess", "shutil")])
        print(threading in vars(concurrent.futures).values() or "threading" in sys.modules)
        """,
    )
    pair = run_both(["train.py"])
    pair.assert_equal()
    assert pair.plain.returncode == 0
