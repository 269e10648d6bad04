"""Updates in backward for an unmodified script: the same bits, and where it keeps off."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.errors import ScriptError
from flatout.levers.observed import Observed
from flatout.levers.optimizer_in_backward import OptimizerInBackward
from flatout.script.describe import observe
from flatout.script.numerics import NumericsRecorder, NumericsRequest
from flatout.script.watch import Watch
from tests.levers.test_catalogue import CPU, SEEN, TURING

LEVER = OptimizerInBackward()
HELD: Any = torch.Tensor.grad
HEAD = """
import copy, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
unused = nn.Parameter(torch.ones(3))
groups = [{"params": [*net[:3].parameters(), unused]}, {"params": list(net[3:].parameters()), "lr": 0.02}]
optimizer = MAKE
x, y = torch.randint(0, 7, (5,)), torch.randint(0, 6, (5,))
def loss():
    return nn.functional.cross_entropy(net(x), y)
"""
MAKES = {
    "sgd": "torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)",
    "sgd foreach": "torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach=True)",
    "adam": "torch.optim.Adam(groups, lr=0.01, foreach=False)",
    "adam foreach": "torch.optim.Adam(groups, lr=0.01, foreach=True)",
    "adamw": "torch.optim.AdamW(groups, lr=0.01)",
    "adamw fused": "torch.optim.AdamW(groups, lr=0.01, fused=True)",
    "adafactor": "torch.optim.Adafactor(groups, lr=0.01)",
    "nadam": "torch.optim.NAdam(groups, lr=0.01)",
}
LOOP = """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
average = copy.deepcopy(net)
for number in range(5):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), net.parameters()):
            mine.lerp_(theirs, 0.1)
"""


class Script:
    """Runs sources in this process, watched as a script is."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self.folder, self.watch = folder, watch

    def run(self, body: str, make: str = MAKES["sgd"], *, on: bool = True, **names: Any) -> dict[str, Any]:
        path = self.folder / "train.py"
        path.write_text(HEAD.replace("MAKE", make) + body)
        space: dict[str, Any] = {"__name__": "__main__", **names}
        applied = LEVER.apply(self.watch.subject, True) if on else contextlib.nullcontext()
        with applied:
            try:
                exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), space)
            except BaseException:
                space["optimizer"].zero_grad()
                raise
        return space

    @property
    def incidents(self) -> list[str]:
        return [why for _, why in self.watch.subject.incidents]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    watch = Watch()
    watch.install(torch)
    yield Script(tmp_path, watch)
    watch.uninstall()
    gc.collect()  # of scripts that have ended
    assert "grad" not in vars(torch.nn.Parameter)


def bits(space: dict[str, Any]) -> list[Any]:
    state = space["optimizer"].state_dict()
    numbers = [value for number in sorted(state["state"]) for value in state["state"][number].values()]
    weights = [*space["net"].parameters(), *space.get("average", space["net"]).parameters(), space["unused"]]
    rates = [group["lr"] for group in state["param_groups"]]
    return [*weights, *[torch.as_tensor(one) for one in [*numbers, *rates] if one is not None]]


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, plain = bits(one), bits(other)
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_the_same_bits_from_the_first_step(make: str, script: Script) -> None:
    plain = script.run(LOOP, make, on=False)
    before = script.watch.finder.steps
    assert_same_bits(script.run(LOOP, make), plain)
    assert script.incidents == []
    assert script.watch.finder.steps - before == 5  # the updates of single weights are no steps of the script's


LOOK = "for number in range(3):\n    optimizer.zero_grad()\n    loss().backward()\n    optimizer.step()\n    look()\n"


@pytest.mark.usefixtures("script")
def test_no_gradient_outlives_its_update(script: Script) -> None:
    held: list[int] = []

    def look() -> None:
        held.append(sum(HELD.__get__(one) is not None for one in torch.nn.Module.parameters(spaces[-1]["net"])))

    spaces: list[dict[str, Any]] = []
    body = "spaces.append(globals())\n" + LOOK
    script.run(body, look=look, spaces=spaces)
    assert held == [0, 0, 0]
    script.run(body, on=False, look=look, spaces=spaces)
    assert min(held[3:]) > 0


CLEARED_LATER = """
for number in range(4):
    loss().backward()
    optimizer.step()
    net.zero_grad()
    optimizer.zero_grad()
"""
TWO = """
optimizer = torch.optim.SGD(net[:3].parameters(), lr=0.1)
second = torch.optim.Adam(net[3:].parameters(), lr=0.01)
for number in range(8):
    net.zero_grad()
    loss().backward()
    optimizer.step()
    second.step()
"""
TIED = """
net = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7, bias=False))
net[1].weight = net[0].weight
y = x.roll(1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for number in range(4):
    optimizer.zero_grad()
    (loss() + sum(one.square().sum() for one in net.parameters())).backward()
    optimizer.step()
"""
ACCUMULATED = """
for number in range(3):
    optimizer.zero_grad()
    for part in range(2):
        loss().backward()
    optimizer.step()
"""
FROZEN = """
for number in range(4):
    net[1].requires_grad_(number > 1)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("body", [CLEARED_LATER, TWO, TIED, FROZEN], ids=["cleared later", "two", "tied", "frozen"])
def test_loops_on_which_it_acts(body: str, script: Script) -> None:
    plain = script.run(body, on=False)
    assert_same_bits(script.run(body), plain)
    assert script.incidents == []


def loop(*lines: str, head: str = "") -> str:
    return head + "\nfor number in range(4):\n" + "".join(f"    {line}\n" for line in lines)


SHARED = """
flat = torch.randn(200)
net[1].weight.data = flat[:48].view(8, 6)
net[3].weight.data = flat[40:104].view(8, 8)
"""
SCHEDULE = """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
optimizer.step()
"""
CLOSURE = """
def closure():
    cost = loss()
    cost.backward()
    return cost
"""
BACKWARD, STEP, ZERO = "loss().backward()", "optimizer.step()", "optimizer.zero_grad()"


def after(head: str) -> str:
    return loop(ZERO, BACKWARD, STEP, head=head)


KEPT_OFF = {
    "clipping": (loop(ZERO, BACKWARD, "nn.utils.clip_grad_norm_(net.parameters(), 0.1)", STEP), "clip_grad_norm_"),
    "reading": (loop(ZERO, BACKWARD, "norm = sum(p.grad.norm() for p in net.parameters())", STEP), "norm = sum("),
    "writing": (loop(ZERO, BACKWARD, "for p in net.parameters(): p.grad.mul_(0.5)", STEP), "for p in net"),
    "accumulation": (ACCUMULATED, "the end of its block"),
    "two passes": (loop(ZERO, BACKWARD, BACKWARD, STEP), "`loss().backward()`"),
    "a condition": (loop(ZERO, BACKWARD, "if number % 2: optimizer.step()"), "`if number % 2:`"),
    "a skip": (loop(ZERO, "cost = loss()", "cost.backward()", "if cost.isnan(): continue", STEP), "`if cost.isnan():`"),
    "a closure": (loop(ZERO, "optimizer.step(closure)", head=CLOSURE), "`return cost`"),
    "a schedule first": (
        loop(ZERO, BACKWARD, "schedule.step()", STEP, head=SCHEDULE),
        "schedule.step() follows",
    ),
    "a scaler": (
        loop(
            ZERO, "scaler.scale(loss()).backward()", "scaler.step(optimizer)", "scaler.update()",
            head="scaler = torch.amp.GradScaler('cpu')",
        ),
        "`scaler.step(optimizer)`",
    ),
    "caught": (f"try:\n    {ZERO}\n    {BACKWARD}\n    {STEP}\nexcept RuntimeError: pass\n", "handled"),
    "never freed": (loop(BACKWARD, STEP), "zero_grad did not free"),
    "filled with zeros": (loop("optimizer.zero_grad(set_to_none=False)", BACKWARD, STEP), "zero_grad did not free"),
    "gradients there": (loop(ZERO, "(0.1 * loss()).backward()", BACKWARD, STEP), "gradients of an earlier backward"),
    "hooks of steps": (after("optimizer.register_step_pre_hook(lambda *a: None)"), "hooks around the optimizer's"),
    "hooks of gradients": (
        after("net[1].weight.register_post_accumulate_grad_hook(lambda p: None)"),
        "post-accumulate-grad hooks",
    ),
    "hooks of modules": (after("net[1].register_full_backward_hook(lambda *a: None)"), "Linear has a backward hook"),
    "its own step": (after("optimizer.step = optimizer.step"), "the optimizer's step was replaced"),
    "its own optimizer": (after("class Mine(torch.optim.SGD): pass\noptimizer = Mine(groups, lr=0.1)"), "Mine is not"),
    "shared by optimizers": (
        loop(ZERO, BACKWARD, STEP, "other.step()", head="other = torch.optim.SGD(net.parameters(), lr=0.1)"),
        "two optimizers share parameters",
    ),
    "shared memory": (after(SHARED), "parameters share memory"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "why"), KEPT_OFF.values(), ids=KEPT_OFF)
def test_it_keeps_off_and_says_why(body: str, why: str, script: Script) -> None:
    plain = script.run(body, on=False)
    script.watch.subject.incidents.clear()
    ours = script.run(body)
    assert_same_bits(ours, plain)
    assert any(why in told for told in script.incidents), script.incidents


def test_one_rare_step_that_clips_runs_as_written(script: Script) -> None:
    """What no trial has seen: the others go on updating in backward."""
    body = """
for number in range(6):
    optimizer.zero_grad()
    if number == 3:
        loss().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    else:
        loss().backward()
        optimizer.step()
"""
    plain = script.run(body, on=False)
    assert_same_bits(script.run(body), plain)
    assert len(script.incidents) == 1


READ_LATER = loop(ZERO, BACKWARD, STEP, "seen.append(net[1].weight.grad)")


def test_who_reads_a_gradient_after_its_update_gets_an_error(script: Script) -> None:
    with pytest.raises(ScriptError, match=r"a gradient is read; it was freed .*; run it without optimizer_in_backward"):
        script.run(READ_LATER, seen=[])
    with pytest.raises(ScriptError, match="a gradient is read"):
        script.run(loop(ZERO, BACKWARD, STEP, "nn.utils.clip_grad_norm_(net.parameters(), 1.0)"))
    torch.optim.SGD(script.run(LOOP)["net"].parameters(), lr=0.1).zero_grad()


def test_who_adds_to_a_gradient_after_its_update_gets_an_error(script: Script) -> None:
    with pytest.raises(ScriptError, match="another gradient before zero_grad"):
        script.run(loop(ZERO, BACKWARD, STEP, BACKWARD, STEP))


def test_what_carries_a_model_elsewhere_may_pass_on_what_is_not_there(script: Script) -> None:
    body = loop(ZERO, BACKWARD, STEP, "net.double()", "net.float()", "net.requires_grad_(True)", "copy.deepcopy(net)")
    plain = script.run(body, on=False)
    assert_same_bits(script.run(body), plain)


def test_zeros_are_zeros_where_the_script_fills_gradients_after_the_update(script: Script) -> None:
    body = loop(ZERO, BACKWARD, STEP, "optimizer.zero_grad(set_to_none=False)", STEP)
    plain = script.run(body, "torch.optim.Adam(groups, lr=0.01)", on=False)
    assert_same_bits(script.run(body, "torch.optim.Adam(groups, lr=0.01)"), plain)


def test_taken_back_between_two_steps_the_script_is_plain(script: Script) -> None:
    """What was freed already is guarded until the script frees it too."""
    body = """
for number in range(5):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    between(number)
"""
    plain = script.run(body, on=False, between=lambda number: None)
    lever = contextlib.ExitStack()
    guarded = []

    def between(number: int) -> None:
        guarded.append("grad" in vars(torch.nn.Parameter))
        if number == 1:
            lever.enter_context(LEVER.apply(script.watch.subject, True))
        elif number == 3:
            lever.close()
            guarded.append("grad" in vars(torch.nn.Parameter))

    assert_same_bits(script.run(body, on=False, between=between), plain)
    assert guarded == [False, False, True, True, True, False]
    assert not script.watch.subject.in_use
    assert torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"


def test_a_signal_waits_until_every_weight_is_updated(script: Script) -> None:
    body = """
class Interrupting(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()
    @staticmethod
    def backward(context, gradient):
        interrupt()
        return gradient
def loss():
    return nn.functional.cross_entropy(net[3:](Interrupting.apply(net[:3](x))), y)
optimizer.zero_grad()
loss().backward()
optimizer.step()
"""
    plain = script.run(body, on=False, interrupt=lambda: None)
    seen: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        script.run("seen.append(globals())\n" + body, seen=seen, interrupt=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert_same_bits(seen[0], plain)  # all of them: as if it had come right after the step


# what is observed, and what follows


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        (LOOP, "update_obstacle", ""),
        (LOOP, "reads_gradients", None),
        (loop(ZERO, BACKWARD, "print(end='')", STEP), "update_obstacle", "`print(end='')` comes before"),
        (
            loop(ZERO, BACKWARD, STEP, head="net[1].register_full_backward_hook(lambda *a: None)"),
            "update_obstacle",
            "hook",
        ),
    ],
)
def test_what_stands_in_its_way_is_seen_at_the_first_step(
    body: str, field: str, why: str | None, script: Script
) -> None:
    found: list[Observed] = []
    script.watch.at_boundary.append(lambda: found.append(observe(script.watch, threads_at_start=None, rows=())))
    script.run(body, on=False)
    if why is not None:
        assert why in (getattr(found[0], field) or "")
        assert bool(why) == bool(found[0].update_obstacle)
    assert isinstance(getattr(found[0], field), str)


OPEN = replace(SEEN, gradients_zeroed=False, reads_gradients="", update_obstacle="")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (replace(OPEN, optimizers=()), "no optimizer"),
        (replace(OPEN, differentiates_twice="train.py mentions create_graph"), "create_graph"),
        (replace(OPEN, captures_graphs="train.py mentions CUDAGraph"), "CUDAGraph"),
        (replace(OPEN, compiled_in_script=True), "torch.compile is already used"),
        (replace(OPEN, scaler_in_script=True), "fp16"),
        (replace(OPEN, gradients_zeroed=True), "fills gradients with zeros"),
        (replace(OPEN, reads_gradients="train.py mentions .grad"), ".grad"),
        (replace(OPEN, reads_gradients=None), "was not examined"),
        (replace(OPEN, update_obstacle="train.py:9: backward() is followed by `if x:`"), "followed by"),
        (replace(OPEN, update_obstacle=None), "was not examined"),
    ],
)
def test_it_is_refused(seen: Observed, why: str) -> None:
    assert why in LEVER.applies(CPU, seen).reason
    assert not LEVER.applies(CPU, seen)


def test_it_is_offered_for_memory_alone() -> None:
    assert LEVER.applies(CPU, OPEN).values == (True,)
    assert LEVER.applies(CPU, replace(OPEN, gradients_zeroed=None))  # it may be called later: each pass asks again
    assert "fp16" in LEVER.applies(TURING, replace(OPEN, device="cuda:0")).reason
    assert (LEVER.aim, LEVER.exactness) == ("memory", "bit-identical")
    assert LEVER.saving(CPU, OPEN).most == 0.0


def recorded(script: Script, role: str, folder: Path, *, on: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was recorded, and the script's names."""
    recorders: list[NumericsRecorder] = []
    turns: list[None] = []

    def boundary() -> None:
        turns.append(None)
        if len(turns) == 4:  # each step has two turns until both optimizers are known
            request = NumericsRequest(steps=3, role=role, folder=str(folder), checks=(1,))  # type: ignore[arg-type]
            recorders.append(NumericsRecorder(script.watch, request))
        elif recorders and recorders[0].steps < 3:
            recorders[0].step_ended()

    script.watch.at_boundary.append(boundary)
    try:
        space = script.run(TWO, on=on)
    finally:
        script.watch.at_boundary.remove(boundary)
    return recorders[0].finish(), space


def test_the_proof_sees_the_gradients_that_were_used(tmp_path: Path, script: Script) -> None:
    (tmp_path / "reference").mkdir()
    plain, held = recorded(script, "reference", tmp_path / "reference", on=False)
    script.watch.subject.optimizers = type(script.watch.subject.optimizers)()
    script.watch.subject.modules = type(script.watch.subject.modules)()
    ours, _ = recorded(script, "checked", tmp_path / "reference", on=True)
    assert held["second"] is not None  # until here: an optimizer made at its address may be taken for it
    assert script.incidents == []
    assert ours["gradient_norms"] == plain["gradient_norms"]
    assert ours["weight_digest"] == plain["weight_digest"]
    (check,) = ours["checks"]
    assert (check["unlike"], check["replaced"]) == ("", True)
    assert check["gradients"]
    assert check["updates"]
    assert all(error == 0 for _, error, *_ in [*check["gradients"], *check["updates"], *check["drift"]])
