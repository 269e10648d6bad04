"""`flatout launch` as a new user meets it: what it refuses, and what it prints without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.__main__ import main
from flatout.parallel.launching import rank_count
from tests.cli.in_process import said_by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no script was given; for example: flatout launch train.py"),
        (["missing.py"], "no such script: missing.py"),
        (["."], ". is a folder; a script is a file; run a package with -m"),
        (["-m"], "-m needs the name of a module"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node is '0'; it is 'auto' or a number from 1 to 1024"),
        (["--nproc-per-node", "abc", "train.py"], "--nproc-per-node is 'abc'"),
        (["--nproc-per-node", "-1", "train.py"], "--nproc-per-node is '-1'"),
        (["--nproc-per-node", "10000", "train.py"], "--nproc-per-node is '10000'"),
        (["--max-restarts", "-1", "train.py"], "max_restarts is -1; it is a whole number, 0 or more"),
        (["--max-restarts", "x", "train.py"], "Invalid value for '--max-restarts'"),
        (["--nnodes", "0", "train.py"], "nnodes is 0"),
        (["--nnodes", "x", "train.py"], "--nnodes is 'x'; it is a number of machines, or the fewest and the most; for"),
        (["--nnodes", "2:", "train.py"], "--nnodes is '2:'"),
        (["--nnodes", "3:2", "--rendezvous", "a:1", "train.py"], "min_nnodes is 3; it is from 1 to 2"),
        (["--nnodes", "1:2", "--min-nnodes", "2", "train.py"], "--nnodes 1:2 and --min-nnodes 2"),
        (["--nnodes", "2", "train.py"], "2 machines, and no rendezvous"),
        (["--nnodes", "2", "--rendezvous", "host", "train.py"], "--rendezvous is 'host'; it is a host and a port"),
        (["--nnodes", "2", "--rendezvous", "host:0", "train.py"], "--rendezvous is 'host:0'"),
        (["--nnodes", "2", "--rendezvous", "::1:5", "train.py"], "--rendezvous is '::1:5'"),
        (["--node-rank", "1", "train.py"], "node_rank is 1"),
        (["--hang-timeout", "soon", "train.py"], "'soon' is not a duration"),
        (["--plan", "missing.toml", "train.py"], "no such plan: missing.toml"),
        (["--interface", "none0", "--nproc-per-node", "1", "train.py"], "no network interface none0 on this machine"),
        (["--manifest", "nomad", "train.py"], "'nomad' is not one of 'slurm', 'kubernetes'"),
        (["--manifest", "slurm", "train.py"], "--nproc-per-node is 'auto'; a manifest is for machines that are not"),
        (["--check", "--manifest", "slurm"], "--check and --manifest"),
        (["--json", "train.py"], "--json without --check"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, words: list[str], complaint: str) -> None:
    said = said_by(folder, "launch", *words)
    assert said.returncode == 2
    assert said.stdout == ""
    assert said.stderr.startswith(f"error: {complaint}") or complaint in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_machines_are_given_as_of_torchrun(folder: Path) -> None:
    """The fewest and the most."""
    options = ("--nproc-per-node", "8", "--rendezvous", "gpu0:29500", "--manifest", "slurm", "train.py")
    one, other = (
        said_by(folder, "launch", *words, *options).stdout
        for words in (("--nnodes", "2:4"), ("--nnodes", "4", "--min-nnodes", "2"))
    )
    assert one == other
    assert "--min-nnodes" in one


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_manifest_starts_nothing(folder: Path, kind: str) -> None:
    words = ("--nnodes", "2", "--nproc-per-node", "8", "--manifest", kind, "train.py", "--lr", "0.1")
    said = said_by(folder, "launch", *words)
    assert (said.returncode, said.stderr) == (0, "")
    assert "train.py" in said.stdout
    assert "--lr" in said.stdout


def test_a_manifest_where_stdout_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdout", None)
    assert main(["launch", "--nproc-per-node", "2", "--manifest", "slurm", "train.py"]) == 0


@pytest.mark.parametrize(("gpus", "asked", "ranks"), [(4, "auto", 4), (4, "2", 2), (0, "auto", 1), (0, "3", 3)])
def test_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, ranks: int) -> None:
    monkeypatch.setattr(rank_count, "detect", lambda: FakeMachine(gpus))
    counted = rank_count.count_ranks(asked)
    assert (counted.ranks, counted.gpus) == (ranks, gpus)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_count, "detect", lambda: FakeMachine(2))
    with pytest.raises(ValueError, match="--devices is 3, and 2 GPUs are visible; each rank has a GPU of its own; use"):
        rank_count.count_ranks("3", option="--devices")


class FakeMachine:
    """With so many GPUs."""

    no_devices_reason = None

    def __init__(self, gpus: int) -> None:
        self.usable_gpus = tuple(range(gpus))
