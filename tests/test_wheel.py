"""The package as a wheel, outside the checkout: what it needs at run time is in it, and the kernel is built from it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flatout import __version__

ROOT = Path(__file__).parents[1]
DATA = (".toml", ".typed", ".cpp", ".h", ".j2", ".css")
USE = """
import sys, flatout, torch
from pathlib import Path
assert Path(flatout.__file__).is_relative_to(sys.argv[1]), flatout.__file__
from flatout.kernels.native import native
gpt = flatout.models.GPT2(flatout.models.GPT2Config(vocab_size=65, max_tokens=16, width=16, heads=2, layers=1))
made = flatout.generate(gpt, [torch.tensor([1, 2, 3])], max_new_tokens=4)
assert len(made.tokens[0]) == 4
found = native()
assert found.library is not None or "compiler" in found.reason, found.reason
print(found.reason)
"""


def python(folder: Path, *words: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders in its source
    source.mkdir()
    for name in ("flatout", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    python(folder, "-m", "pip", "wheel", *options, str(source))
    (built,) = folder.glob("*.whl")
    return built


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "flatout").rglob("*") if path.suffix in (".py", *DATA)]
    needed = {str(path.relative_to(ROOT)) for path in files}
    assert needed - inside == set()
    tops = {name.partition("/")[0] for name in inside}
    assert tops == {"flatout", f"flatout-{__version__}.dist-info"}


@pytest.mark.slow
def test_it_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target, cache = tmp_path / "site", tmp_path / "cache"
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(target)]
    python(tmp_path, "-m", "pip", "install", *options, str(wheel))
    own = {"PYTHONPATH": str(target), "FLATOUT_CACHE_DIR": str(cache)}
    assert python(tmp_path, str(target / "bin" / "flatout"), "--version", **own) == f"flatout {__version__}\n"
    reason = python(tmp_path, "-c", USE, str(target), **own).strip()
    assert reason.startswith(str(cache)) or "compiler" in reason
