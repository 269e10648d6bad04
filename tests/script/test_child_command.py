"""A process of ours imports its own modules, whatever lies in the folder where it is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flatout.script.child_command import child_command


def test_files_of_the_users_are_not_imported_for_pythons(tmp_path: Path) -> None:
    for name in ("json", "statistics", "flatout"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    ended = subprocess.run(child_command("flatout", "--version"), cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "flatout"), ended.stderr
