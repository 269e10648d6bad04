"""In overlay mode the untrusted script's writes all succeed, and none of them is there afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.script.isolation import cleanup

from .users_home import HERE, SOMEBODY, fill, give_to, take_snapshot

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make a mount or become another user")
USERS = [0, pytest.param(SOMEBODY, marks=needs_root)]
Place = Callable[[str], Path]
Run = Callable[..., dict[str, Any]]


def expect_all_done(outcome: dict[str, str]) -> None:
    assert not {name: said for name, said in outcome.items() if said != "done"}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("parent", ["/tmp", "/var/tmp"])  # beside the scratch, and on another layer
def test_nothing_of_all_that_is_left(new_place: Place, run_stranger: Run, parent: str, user: int) -> None:
    base, scratch = new_place(parent), new_place("/tmp")
    home = base / "my home, a: b\\c"
    fill(home)
    if user:
        give_to(user, base)
        give_to(user, scratch)
    before = take_snapshot(base)
    loose = [f"{parent}/flatout-loose.txt", f"/proc/self/root{parent}/flatout-loose.txt"]

    answer = run_stranger(mode="overlay", scratch=scratch / "s", home=home, user=user, also=loose)

    expect_all_done(answer["outcome"])
    assert take_snapshot(base) == before
    assert not Path(loose[0]).exists()
    assert answer["isolation"]["mode"] == "overlay"
    cleanup(scratch / "s")
    assert not (scratch / "s").exists()


@pytest.mark.parametrize("user", USERS)
def test_scratch_inside_the_home(new_place: Place, run_stranger: Run, user: int) -> None:
    base = new_place("/var/tmp")
    fill(base / "home")
    if user:
        give_to(user, base)
    scratch = base / "home" / ".cache" / "flatout" / "s"
    scratch.mkdir(parents=True)
    if user:
        give_to(user, base / "home" / ".cache")
    before = take_snapshot(base)

    # Folders of this home are layers of their own, so that moving a file between them is not one step (EXDEV).
    answer = run_stranger(mode="overlay", scratch=scratch, home=base / "home", user=user)

    refused = {name for name, said in answer["outcome"].items() if said != "done"}
    assert refused <= {"replace_in_other_folder", "remove_tree"}
    cleanup(scratch)
    after = take_snapshot(base)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= {str(scratch), str(scratch.parent)}


def test_working_directory_through_a_link(new_place: Place, run_stranger: Run) -> None:
    base, scratch = new_place("/var/tmp"), new_place("/tmp")
    fill(base / "home")
    (base / "alias").symlink_to("home")
    before = take_snapshot(base)

    answer = run_stranger(mode="overlay", scratch=scratch, home=base / "alias", user=0)

    expect_all_done(answer["outcome"])
    assert take_snapshot(base) == before
    cleanup(scratch)
    scratch.mkdir()


@pytest.mark.parametrize("user", USERS)
def test_shared_folders_and_scratch_stay(new_place: Place, run_stranger: Run, user: int) -> None:
    base, scratch, shared = new_place("/var/tmp"), new_place("/tmp"), new_place("/var/tmp")
    fill(base / "home")
    if user:
        for place in (base, scratch, shared):
            give_to(user, place)
    stays = [str(shared / "cached"), str(scratch / "result")]

    answer = run_stranger(
        mode="overlay", scratch=scratch, home=base / "home", user=user, shared=[shared], also=stays, writes=["append"]
    )

    assert set(answer["outcome"].values()) == {"done"}
    assert [Path(path).read_text() for path in stays] == ["x", "x"]


@needs_root
def test_root_cannot_reach_around(new_place: Place, run_stranger: Run) -> None:
    base, scratch = new_place("/var/tmp"), new_place("/tmp")
    fill(base / "home")
    around = [f"/proc/{pid}/root{base}/escaped" for pid in (1, os.getpid())]  # 1 is the trial's own

    answer = run_stranger(
        mode="overlay", scratch=scratch, home=base / "home", user=0, also=["/flatout-loose.txt", *around]
    )

    assert answer["outcome"]["/flatout-loose.txt"] == "done"
    assert not Path("/flatout-loose.txt").exists()
    assert answer["outcome"][around[1]].startswith(("FileNotFoundError", "PermissionError"))
    assert not (base / "escaped").exists()


def in_small_file_system(mounted: Path, size: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The untrusted script where `mounted` is a file system of its own, made in a namespace that only this call has."""
    script = HERE / "small_file_system.py"
    command = [sys.executable, str(script), str(mounted), size, json.dumps(asked, default=str)]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[2]}:{HERE}", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    if "MachineError" in ended.stderr or "refused" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[-1])
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_home_on_a_mount_of_its_own(new_place: Place, user: int) -> None:
    base, scratch = new_place("/var/tmp"), new_place("/tmp")
    if user:
        give_to(user, scratch)
    asked = {"mode": "overlay", "scratch": scratch, "home": base / "home", "user": user}

    answer = in_small_file_system(base, "64m", asked)

    expect_all_done(answer["outcome"])
    assert answer["before"] == answer["after"]


@needs_root
def test_a_full_scratch_is_an_error_of_the_script_alone(new_place: Place) -> None:
    base, scratch = new_place("/var/tmp"), new_place("/tmp")
    fill(base / "home")
    asked = {
        "mode": "overlay",
        "scratch": scratch,
        "home": base / "home",
        "user": 0,
        "writes": ["append", "checkpoint"],
    }

    answer = in_small_file_system(scratch, "1m", asked)

    assert answer["outcome"]["append"] == "done"
    assert "No space left on device" in answer["outcome"]["checkpoint"]
    assert answer["before"] == answer["after"]


@needs_root
@pytest.mark.parametrize("user", USERS)
def test_a_scratch_that_cannot_carry_layers(new_place: Place, user: int) -> None:
    base, scratch = new_place("/var/tmp"), new_place("/tmp")
    fill(base / "home")
    if user:
        give_to(user, base)
    asked = {"mode": "overlay", "scratch": scratch, "home": base / "home", "user": user}

    answer = in_small_file_system(scratch, "overlay", asked)

    expect_all_done(answer["outcome"])
    assert answer["before"] == answer["after"]
    assert any(detail.startswith("all changes are held in memory") for detail in answer["isolation"]["details"])
