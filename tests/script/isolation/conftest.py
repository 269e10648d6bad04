"""Places outside pytest's own directory, and the untrusted script that is let loose on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .users_home import HERE


@pytest.fixture
def new_place() -> Iterator[Callable[[str], Path]]:
    """Directories outside pytest's own, which only its user may enter."""
    made: list[Path] = []

    def make(parent: str) -> Path:
        place = Path(tempfile.mkdtemp(prefix="flatout-", dir=parent))
        place.chmod(0o755)
        made.append(place)
        return place

    yield make
    for place in made:
        shutil.rmtree(place)


@pytest.fixture
def run_stranger() -> Callable[..., dict[str, Any]]:
    def run(**asked: Any) -> dict[str, Any]:
        command = [sys.executable, str(HERE / "untrusted.py"), json.dumps(asked, default=str)]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
        if "MachineError" in ended.stderr:
            pytest.skip(ended.stderr.splitlines()[-1])
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run
