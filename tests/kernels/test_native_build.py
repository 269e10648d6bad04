"""A build is loaded only whole and only from a place that is ours; without a compiler an earlier one still serves."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout import environment
from flatout.kernels.native import Native, native


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small shared library, in place of what a real build makes."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    command = ["g++", "-shared", "-fPIC", str(folder / "one.cpp"), "-o", str(folder / "one.so")]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no C++ compiler")
    return folder / "one.so"


@pytest.fixture
def compiler(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that gives that library at once and notes each call with its first argument."""
    stub = tmp_path / "c++"
    stub.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nfor last in "$@"; do :; done\ncp {library} "$last"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("CXX", str(stub))
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    return stub


@pytest.fixture
def load(compiler: Path) -> Iterator[Callable[[], Native]]:
    """As a fresh process would."""

    def fresh() -> Native:
        native.cache_clear()
        return native()

    yield fresh
    native.cache_clear()


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


def kept(folder: Path) -> Path:
    (found,) = (folder / "cache" / "native").glob("*.so")
    return found


def test_a_build_is_used_again(load: Any, tmp_path: Path) -> None:
    first = load()
    assert first.library is not None
    assert first.library.one() == 1
    assert load().reason == first.reason == str(kept(tmp_path))
    assert len(calls(tmp_path)) == 1
    assert {path.stat().st_mode & 0o077 for path in kept(tmp_path).parent.rglob("*")} == {0}


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_a_truncated_or_empty_library_is_built_again(left: int, load: Any, tmp_path: Path) -> None:
    load()
    whole = kept(tmp_path).read_bytes()
    assert left < len(whole)
    kept(tmp_path).unlink()  # a file of its own: this process has the first one mapped
    broken = next((tmp_path / "cache" / "native").iterdir())
    library = broken.with_name(f"{broken.name}-{json.loads(broken.read_text())['checksum'][:16]}.so")
    library.write_bytes(whole[:left])
    library.chmod(0o500)
    found = load()
    assert found.library is not None
    assert len(calls(tmp_path)) == 2
    assert library.read_bytes() == whole


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"../../elsewhere"])
def test_a_record_that_is_none_is_not_believed(text: bytes, load: Any, tmp_path: Path) -> None:
    load()
    record = next(path for path in (tmp_path / "cache" / "native").iterdir() if path.suffix != ".so")
    record.chmod(0o600)
    record.write_bytes(text)
    assert load().library is not None
    assert len(calls(tmp_path)) == 2


def test_a_build_serves_when_the_compiler_is_gone(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load().reason == first.reason
    kept(tmp_path).unlink()
    assert load().reason == "there is no C++ compiler 'no-such-compiler'"


@pytest.mark.parametrize("words", ["{} -m64", "'{}' -m64 -g"])
def test_a_compiler_with_arguments(
    words: str, load: Any, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", words.format(compiler))
    assert load().library is not None
    assert calls(tmp_path) == ["-m64"]


def test_a_command_that_is_none(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    assert load() == Native(library=None, reason='CXX is "g++ \'unclosed": No closing quotation')


def test_a_folder_that_others_can_write_is_refused(load: Any, tmp_path: Path) -> None:
    load()
    folder = tmp_path / "cache" / "native"
    for mode in (0o770, 0o777):
        folder.chmod(mode)
        found = load()
        assert found.library is None
        assert found.reason == f"others can write {folder} (mode {mode:o}); chmod go-w {folder}"
    folder.chmod(0o755)
    assert load().library is not None


def test_a_library_that_others_can_write_is_refused(load: Any, tmp_path: Path) -> None:
    load()
    kept(tmp_path).chmod(0o702)
    assert load().reason.startswith(f"others can write {kept(tmp_path)} (mode 702)")


def test_what_belongs_to_somebody_else_is_refused(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    owner = kept(tmp_path).stat().st_uid
    if owner == 0:  # root's own files are trusted by everybody: make them another user's
        os.chown(tmp_path / "cache" / "native", 4321, 4321)
        owner = 4321
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    told = load().reason
    assert f"native belongs to user {owner}, whose code would be loaded; set FLATOUT_CACHE_DIR" in told


def test_no_home_and_no_entry_in_the_password_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLATOUT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    assert environment.cache_dir() == tmp_path / f"flatout-{os.getuid()}"


def test_a_cache_that_cannot_be_made_is_a_reason(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "file"))
    found = load()
    assert found.library is None
    assert "Not a directory" in found.reason or "File exists" in found.reason
