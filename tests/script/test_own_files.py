"""A script's own files: what it imports from its folder and PYTHONPATH, found without running any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.script.entry import Target
from flatout.script.own_files import own_files, source_digests

FILES = {
    "train.py": "import os, torch\nimport net.blocks as b\nfrom local import thing\nfrom beside import other\n",
    "net/__init__.py": "from . import lazy\n",
    "net/blocks.py": "from .parts.small import f\nfrom .. import nowhere\n",
    "net/lazy.py": "raise SystemExit('it ran')\n",
    "net/parts/small.py": "import net\n",
    "local.py": "def broken(:\n",
    "unused.py": "",
    "lib/beside.py": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    return tmp_path


def names(target: Target) -> list[str]:
    return [file.name for file in own_files(target)]


def test_modules_from_the_folder_and_python_path(folder: Path) -> None:
    assert names(Target(path=str(folder / "train.py"))) == [
        *("train.py", "net/__init__.py", "net/blocks.py", "local.py", "beside.py", "net/lazy.py", "net/parts/small.py")
    ]


def test_a_module_of_a_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert names(Target(module="net.blocks"))[0] == "net/blocks.py"
    assert "net/parts/small.py" in names(Target(module="net.blocks"))
    (folder / "net" / "__main__.py").write_text("")
    assert names(Target(module="net"))[0] == "net/__main__.py"
    with pytest.raises(UsageError, match="no file of module other"):
        own_files(Target(module="other"))


def test_digests_change_with_any_of_them(folder: Path) -> None:
    target = Target(path=str(folder / "train.py"))
    before = source_digests(target)
    assert before[0].endswith(" train.py")
    (folder / "unused.py").write_text("x = 1\n")
    assert source_digests(target) == before
    (folder / "net" / "lazy.py").write_text("x = 1\n")
    changed = {one.partition(" ")[2] for one in {*source_digests(target)} ^ {*before}}
    assert changed == {"net/lazy.py"}


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.py"
    path.write_text("")
    (digest,) = source_digests(Target(path=str(path)))
    assert digest.endswith("caf\\udce9.py")
