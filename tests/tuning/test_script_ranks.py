"""Trials of a script that trains in ranks by itself: what ranks answer together, and a tune from end to end."""

from __future__ import annotations

import json
import os
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.application.tune import tune
from flatout.errors import ScriptError, TrialError, UsageError
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.machine.detect import detect
from flatout.plan import Plan, write_plan
from flatout.script.entry import Target
from flatout.script.numerics import NumericsRequest
from flatout.script.trial.answers import TrialEnded, TrialHangs
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.numerics import Numerics
from flatout.tuning.ranks import group as ranks_group
from flatout.tuning.ranks.group import as_one
from flatout.tuning.ranks.script import ScriptRanks, ScriptRanksTrial
from flatout.tuning.script_tuning import TuneRequest, tune_script
from tests.processes import Python
from tests.tuning.test_ranks_trial import processes_of

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs namespaces of Linux")

TRAINED = """\
draw = torch.Generator().manual_seed(rank)
for step in range({steps}):
    {body}
    a, b = torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(a), b).backward()
    optimizer.step()
"""
SCRIPT = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
if {sharded}:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
{trained}    if step == 2 and rank == 0:
        torch.save(step, "step.pt")
    if step == 2:
        dist.barrier()
        assert torch.load("step.pt") == 2
""".replace("{trained}", TRAINED)
SPAWNS = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, count):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    dist.init_process_group("gloo", rank=rank, world_size=count)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.Adam(model.parameters())
{trained}    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (2,), nprocs=2)
""".replace("{trained}", textwrap.indent(TRAINED, "    "))
PLANTED = """
import contextlib
from tests.tuning.planted_levers import Helps, Planted, quicker


class CorruptsOneRank(Planted):
    name = "corrupts one rank"
    plan_field = "flush_denormals"

    @contextlib.contextmanager
    def apply(self, subject, value):
        import torch.distributed as dist
        from flatout.parameters import own_part

        def visit(optimizer):
            def before(optimizer, args, kwargs):
                for group in optimizer.param_groups if dist.get_rank() == 1 else ():
                    for parameter in group["params"]:
                        own_part(parameter.grad).mul_(1.001)

            hook = optimizer.register_step_pre_hook(before)
            return lambda optimizer: hook.remove()

        with quicker(), subject.optimizers.each(visit):
            yield


LEVERS = (CorruptsOneRank(), Helps())
"""

Group = Callable[..., ScriptRanksTrial]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """`group(body="pass", steps=1000, sharded=False, spawns=False)`: of two ranks, not started yet."""
    made: list[ScriptRanksTrial] = []
    here = Path.cwd()
    (tmp_path / "work").mkdir()
    (tmp_path / "user").mkdir()
    os.chdir(tmp_path / "user")

    def group(
        body: str = "pass",
        *,
        steps: int = 100_000,
        sharded: bool = False,
        spawns: bool = False,
        count: int = 2,
        hangs: float = 30.0,
    ) -> ScriptRanksTrial:
        values = {"steps": steps, "body": body, "sharded": sharded, "port": free_port()}
        Path("train.py").write_text((SPAWNS if spawns else SCRIPT).format(**values))
        setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path / "work", hang_floor_seconds=hangs)
        made.append(ScriptRanks(setup=setup, count=count, own=spawns).trial())
        return made[-1]

    yield group
    for trial in made:
        trial.close()
    os.chdir(here)
    assert processes_of(tmp_path) == []
    assert [one.name for one in (tmp_path / "user").iterdir()] == ["train.py"]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def numerics(rank: int, **changed: Any) -> dict[str, Any]:
    return {
        "event": "numerics",
        "losses": [[1.0 + rank], [2.0 + rank]],
        "gradient_norms": [3.0, 4.0],
        "gradient_norms_by_tensor": [[3.0], [4.0]],
        "parameters": ["weight"],
        "weight_digest": f"w{rank}",
        "buffer_digest": "b",
        "generator_digest": f"g{rank}",
        "finite": True,
        "checks": [
            {
                "step": step,
                "same_generators": True,
                "unlike": "",
                "replaced": True,
                "drift": [],
                "gradients": [("weight", 0.1 * rank, 1.0, 1.0)],
                "updates": [],
            }
            for step in (0, 4)
        ],
        "in_codes": [],
        "compared": "every element",
        "ended": False,
        "unseeded": [],
        "resident_bytes": 100,
        "peak_resident_bytes": 300,
        "rolled_back": [],
        **changed,
    }


def test_numbers_of_ranks_are_those_of_all_of_them() -> None:
    checks = numerics(1)["checks"]
    answer = as_one([numerics(0), numerics(1, finite=False, checks=checks[:1], unseeded=["train.py:3"])])
    found = Numerics.from_answer(answer)
    assert found.mean_losses() == (1.5, 2.5)
    assert found.norms == (pytest.approx(18**0.5), pytest.approx(32**0.5))
    assert found.weight_digest == "w0 w1"
    assert not found.finite
    assert found.unseeded == ("train.py:3",)
    assert [check.step for check in found.checks] == [0]  # that both have
    assert [(one.name, one.error) for one in found.checks[0].gradients] == [("weight", 0.0), ("rank 1: weight", 0.1)]
    assert (answer["resident_bytes"], answer["peak_resident_bytes"]) == (200, 600)


def test_a_peak_is_that_of_the_rank_with_the_largest() -> None:
    told = {"event": "peak", "peak_resident_bytes": 5, "incidents": [], "resident_bytes": 1, "rolled_back": []}
    assert as_one([{**told, "peak_bytes": 3}, {**told, "peak_bytes": 7}])["peak_bytes"] == 7
    assert as_one([{**told, "peak_bytes": 3}, {**told, "peak_bytes": None}])["peak_bytes"] is None


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_answer_what_one_process_does(group: Group, sharded: bool) -> None:
    lever = Choice(next(one for one in LEVERS if one.plan_field == "precision"), "bf16")
    with group(sharded=sharded) as trial:
        trial.start()
        assert trial.isolation["mode"] == "overlay"
        assert trial.describe().device == "cpu"
        plain = trial.window([], settle=1, steps=3)
        under_lever = trial.window([lever], settle=1, steps=3)
        assert len(plain.seconds) == len(under_lever.seconds) == 3
        assert under_lever.rolled_back == {}
        assert trial.peak([]).peak_bytes
        request = NumericsRequest(steps=6, role="reference", folder=str(trial.folder), checks=(0, 4))
        found = Numerics.from_answer(trial.numerics([], request))
        assert [len(step) for step in found.losses] == [2] * 6  # of each rank
        again = Numerics.from_answer(
            trial.numerics([], NumericsRequest(steps=6, role="checked", folder=request.folder))
        )
        assert [check.step for check in again.checks] == [0, 4]
        assert len(again.checks[0].gradients) == 2 * len(found.parameters)
        assert max(one.relative for one in again.checks[0].gradients) > 0.01  # other batches


@needs_linux
@pytest.mark.slow
def test_a_rank_that_fails_alone_is_named_with_its_exception(group: Group) -> None:
    trial = group("if step == 4 and rank == 1: raise ValueError('broken')")
    trial.start()
    with pytest.raises(TrialEnded) as caught:
        trial.window([], settle=0, steps=30)
    assert (caught.value.status, caught.value.note) == (1, "rank 1")
    assert caught.value.headline == "ValueError: broken"


@needs_linux
@pytest.mark.slow
def test_processes_that_a_script_starts_are_ranks_as_well(group: Group) -> None:
    lever = Choice(next(one for one in LEVERS if one.plan_field == "optimizer"), "fused")
    with group(spawns=True) as trial:
        trial.start()
        assert [told["ranks"] for told in trial.ready] == [2, 2]
        assert len(trial.window([lever], settle=1, steps=3).seconds) == 3
        found = Numerics.from_answer(trial.numerics([], NumericsRequest(steps=4)))
        assert [len(step) for step in found.losses] == [2] * 4


@needs_linux
@pytest.mark.slow
def test_ranks_that_meet_at_an_address_of_the_machine_are_told_that_a_trial_has_none(group: Group) -> None:
    trial = group(spawns=True)
    script = Path("train.py")
    script.write_text(script.read_text().replace("127.0.0.1", "192.0.2.1"))
    with pytest.raises(ScriptError, match=r"not all of 2 ranks made a step.*loopback.*--allow-network"):
        trial.start(timeout_seconds=10.0)


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (("torch.manual_seed(0)", "raise ValueError('broken')"), 1, "ValueError: broken"),
        (("mp.spawn(train, (2,), nprocs=2)", "pass"), 0, ""),
    ],
)
def test_processes_that_end_before_a_first_step(group: Group, change: tuple[str, str], status: int, said: str) -> None:
    trial = group(spawns=True)
    script = Path("train.py")
    script.write_text(script.read_text().replace(*change))
    with pytest.raises(TrialEnded) as caught:
        trial.start()
    assert (caught.value.status, caught.value.steps) == (status, 0)
    assert said in caught.value.error


@needs_linux
@pytest.mark.slow
def test_the_script_says_why_a_process_that_it_started_has_failed(group: Group) -> None:
    # The other rank comes late: where both have failed, torch may name the one that failed for want of the first.
    breaks, late = "exec('raise ValueError(\"broken\")')", "__import__('time').sleep(5)"
    trial = group(f"if step == 4: {breaks} if rank == 1 else {late}", spawns=True)
    trial.start()
    with pytest.raises(TrialEnded) as caught:
        trial.window([], settle=0, steps=30)
    assert caught.value.status == 1
    assert "ValueError: broken" in caught.value.error


@needs_linux
@pytest.mark.slow
def test_a_script_that_starts_another_number_of_ranks_is_refused(group: Group) -> None:
    with pytest.raises(ScriptError, match=r"train\.py trains in 2 ranks; it was to train in 3; give 2"):
        group(spawns=True, count=3).start()


@needs_linux
@pytest.mark.slow
def test_a_run_applies_the_plan_in_the_processes_that_the_script_starts(group: Group, python: Python) -> None:
    with group(spawns=True, steps=300) as trial:
        trial.start()
        loop = trial.describe().loop
    user = Path.cwd()
    here = detect()
    plan = Plan(loop=loop, machine_fingerprint=here.fingerprint, torch_version=here.versions.torch)
    write_plan(user / "flatout.toml", plan.with_choice("optimizer", "fused", "for this test"))
    ran = python("-m", "flatout", "run", "--report", "run.json", "train.py", cwd=user)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(Path("run.json").read_text())
    Path("run.json").unlink()
    Path("flatout.toml").unlink()
    assert [one["applied"] for one in report["processes"]] == [["fused optimizer"]] * 2
    assert not any("was not applied" in note for note in report["plan_notes"])


@needs_linux
@pytest.mark.slow
def test_ranks_that_wait_for_one_another_hang(group: Group) -> None:
    trial = group("if step == 4 and rank == 0: time.sleep(1000)", hangs=3.0)
    trial.start()
    trial.expected_step_seconds = 0.01
    with pytest.raises(TrialHangs, match=r"no step for \d+ s: it hangs at train.py:\d+") as hang:
        trial.window([], settle=0, steps=30)
    assert "(rank 0)" in hang.value.location


@needs_linux
@pytest.mark.slow
def test_a_script_for_one_process_is_refused_in_ranks(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(10000):\n"
        "    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    with pytest.raises(
        ScriptError, match=r"alone\.py trains by itself in each of 2 processes.*without --nproc-per-node"
    ):
        tune(script, nproc_per_node=2, seconds=400)


@needs_linux
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nproc_per_node": 2, "devices": 2}, "devices and nproc_per_node.*use one of them"),
        ({"nproc_per_node": 2, "own_ranks": 2}, "nproc_per_node and own_ranks.*use one of them"),
        ({"nproc_per_node": 0}, "nproc_per_node is '0'"),
        ({"nproc_per_node": "two"}, "nproc_per_node is 'two'"),
    ],
)
def test_what_ranks_exclude(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=said):
        tune(tmp_path / "train.py", **arguments)


@needs_linux
def test_a_launcher_is_told_how_its_script_is_tuned(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("")
    with pytest.raises(UsageError, match=r"torchrun starts ranks.*--nproc-per-node"):
        tune(tmp_path / "torchrun", arguments=["--nproc-per-node", "2", "train.py"])


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_lever_that_is_wrong_in_one_rank_is_found_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    Path("train.py").write_text(SCRIPT.format(steps=100_000, body="time.sleep(0.02)", sharded=sharded))
    Path("planted.py").write_text(PLANTED)
    request = TuneRequest(
        target=Target(path="train.py"), budget_seconds=400.0, levers=f"{tmp_path / 'planted.py'}:LEVERS", ranks=2
    )
    found = tune_script(request, detect())
    outcomes = {trial.label: (trial.outcome, trial.reason) for trial in found.trials}
    assert outcomes["corrupts one rank"][0] == "failed"
    assert "rank 1: " in outcomes["corrupts one rank"][1]
    assert [choice.label for choice in found.state.kept] == ["helps"]
    assert found.proof is not None
    assert found.proof.verdict == "bit-identical"
    assert found.speedup is not None
    assert found.speedup.ratio > 1.5
    assert not (tmp_path / "step.pt").exists()


def test_a_group_that_never_started_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "mine").write_text("kept")
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    with ScriptRanksTrial(setup, 2):
        pass
    assert (tmp_path / "scratch" / "mine").read_text() == "kept"


def test_a_group_is_closed_although_its_folder_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trial that is one process is."""

    def busy(folder: Path) -> None:
        raise TrialError(f"cannot remove {folder}: Device or resource busy")

    monkeypatch.setattr(ranks_group, "cleanup", busy)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    with ScriptRanks(setup=setup, count=2).trial() as trial:
        trial._spawned = True
    assert not trial.alive
