"""The scripts that searches are judged by, and where each is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gain.__main__ import CASES, ENDLESS
from benchmarks.gain.__main__ import SCRIPT as TRAINING
from benchmarks.scripts.catalogue import MORE_SCRIPTS, PUBLIC_SCRIPTS
from benchmarks.scripts.workspace import find_checkout, fresh_workspace

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OWN = {
    "digits_mlp": (str(EXAMPLES / "digits_mlp.py"), "--epochs", "100000"),
    "digits_cnn": (str(EXAMPLES / "digits_cnn.py"), "--epochs", "100000"),
    **{
        f"{kind} {width} {batch}": (
            str(TRAINING), kind, "--width", str(width), "--batch", str(batch), "--steps", str(ENDLESS)
        )
        for kind, width, batch, _ in CASES
    },
}  # fmt: skip
"""This project's own, by name: the command."""

PUBLIC = (*PUBLIC_SCRIPTS, *MORE_SCRIPTS)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What to start, in which folder, with which environment: this project can be imported there."""

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]


@contextmanager
def place_of(name: str, checkouts: Path | None) -> Iterator[Place | None]:
    """Of a script; None where its checkout is missing."""
    if name in OWN:
        yield Place(command=OWN[name], folder=ROOT, environment=_importable(os.environ))
        return
    script = next(one for one in PUBLIC if one.name == name)
    checkout = find_checkout(script, checkouts or Path())
    if checkout is None:
        yield None
        return
    with fresh_workspace(script, checkout, tuned=True) as workspace:
        command = script.tuned_argv or script.argv
        yield Place(command=command, folder=workspace.directory, environment=_importable(workspace.environment))


def in_its_place(name: str, checkouts: Path | None, module: str, words: Sequence[str]) -> dict[str, Any] | None:
    """What `python -m module --one OUT`, with `words` and the script's command, leaves in OUT as JSON; None: it could
    not be done, and why was printed. It is started where the script is, with a cache folder of its own, in which there
    are neither compiled kernels nor earlier tunes."""
    with place_of(name, checkouts) as place, tempfile.TemporaryDirectory() as folder:
        if place is None:
            return None
        out = Path(folder) / "found.json"
        done = subprocess.run(
            [sys.executable, "-m", module, "--one", str(out), *words, *place.command],
            cwd=place.folder,
            env={**place.environment, "FLATOUT_CACHE_DIR": str(Path(folder) / "cache")},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            print(f"{name}: {done.stderr.strip()[-400:]}", flush=True)
            return None
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _importable(environment: Mapping[str, str]) -> dict[str, str]:
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
