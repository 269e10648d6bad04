"""Scripts patched in a folder, and the lines that changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from flatout.plan import Plan
from flatout.report.source_patch_text import patch_bytes
from flatout.script.entry import Target
from flatout.script.own_files import own_files
from flatout.source_patch.patch import source_patch
from flatout.source_patch.result import SourcePatch

ON_CPU = "Net of 12 weights (float32), SGD over 2 tensors, on cpu"


def patch_for(
    folder: Path,
    source: str | bytes,
    *,
    name: str = "train.py",
    report: Mapping[str, object] | None = None,
    loop: str | None = ON_CPU,
    **choices: object,
) -> SourcePatch:
    """Of a script that is written there."""
    path = folder / name
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    return patch_of_target(folder, Target(path=name), report=report, loop=loop, **choices)


def patch_of_target(
    folder: Path,
    target: Target,
    *,
    report: Mapping[str, object] | None = None,
    loop: str | None = ON_CPU,
    **choices: object,
) -> SourcePatch:
    plan = Plan(script=target.name, loop=loop, **choices)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        paths = [file.path for file in own_files(target)]
        return source_patch(plan, paths, name=target.name, report=report, no_report="nobody measured")


def changed_lines(patch: SourcePatch) -> str:
    """What is removed and added, in order."""
    lines = [line for file in patch.files for hunk in file.hunks for line in hunk.lines]
    return b"".join(line for line in lines if line[:1] in b"+-").decode()


def applied(folder: Path, patch: SourcePatch, tool: str = "patch") -> None:
    """By `patch -p1` or `git apply`, in that folder."""
    (folder / "a.patch").write_bytes(patch_bytes(patch, ["train.py"]))
    words = {"patch": ["patch", "-p1", "-i", "a.patch"], "git": ["git", "apply", "a.patch"]}[tool]
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(words, cwd=folder, check=True, capture_output=True, env=outside)
    (folder / "a.patch").unlink()
