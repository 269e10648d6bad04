"""Adam's moments in 8 bits for an unmodified script: what it saves, loads and reads stays what it was."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flatout.levers.low_bit import is_in_codes
from flatout.levers.observed import Observed
from flatout.levers.optimizer_state import LowBitState
from flatout.script.describe import observe
from flatout.script.step_memory import follow_memory
from flatout.script.watch import Watch
from tests.levers.test_catalogue import CPU, SEEN

LEVER = LowBitState()
WIDTH = 64
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


class Loop:
    """A script's training, step by step."""

    def __init__(self, make: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.optimizer = make(self.net.parameters(), **{"lr": 1e-3, **options})
        self.x, self.y = torch.randn(16, WIDTH), torch.randint(0, 3, (16,))

    def loss(self) -> Any:
        return nn.functional.cross_entropy(self.net(self.x), self.y)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @property
    def large(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[self.net[0].weight]
        return state

    @property
    def in_codes(self) -> bool:
        return is_in_codes(self.large.get("exp_avg"))


@needs_torchao
def test_the_course_is_nearly_the_same_and_undone_the_script_is_plain(watch: Watch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of what other tests have compiled
    plain, ours = Loop(), Loop()
    expected = plain.steps(9)
    with LEVER.apply(watch.subject, "8bit"):
        losses = ours.steps(6)
        assert ours.in_codes
        assert ours.large["exp_avg"].codes.dtype == torch.uint8
        assert not is_in_codes(ours.optimizer.state[ours.net[0].bias]["exp_avg"])
    losses += ours.steps(3)
    assert losses == pytest.approx(expected, rel=0.02)
    assert {name: type(value) for name, value in ours.large.items()} == {
        name: type(value) for name, value in plain.large.items()
    }
    assert ours.large["step"] == plain.large["step"] == 9
    assert vars(ours.optimizer).keys() == vars(plain.optimizer).keys()
    assert not ours.optimizer._optimizer_step_pre_hooks
    assert not ours.optimizer._optimizer_state_dict_post_hooks
    assert watch.finder.steps == 18
    assert not watch.saw_compile  # the kernel is compiled; the script compiles nothing


@needs_torchao
def test_a_checkpoint_is_loaded_with_and_without_it(watch: Watch) -> None:
    """And with it, the resumed run has the same bits."""
    with LEVER.apply(watch.subject, "8bit"):
        first = Loop()
        first.steps(3)
        saved = {"net": first.net.state_dict(), "optimizer": first.optimizer.state_dict()}
        states = saved["optimizer"]["state"]
        assert all(type(value) is torch.Tensor for entry in states.values() for value in entry.values())
        saved = torch.load(_written(saved), weights_only=True)
        assert first.in_codes  # saving changed nothing
        going_on = first.steps(3)
        resumed = Loop()
        resumed.steps(1)
        resumed.net.load_state_dict(saved["net"])
        resumed.optimizer.load_state_dict(saved["optimizer"])
        assert resumed.steps(3) == going_on
        assert resumed.in_codes
    without = Loop()
    without.net.load_state_dict(saved["net"])
    without.optimizer.load_state_dict(saved["optimizer"])
    assert without.steps(3) == pytest.approx(going_on, rel=0.02)


def _written(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


@needs_torchao
def test_what_comes_between_backward_and_step_means_what_it_meant(watch: Watch) -> None:
    """Clipping, accumulation, a skipped step, a rate that is changed late."""

    def train(loop: Loop) -> list[float]:
        losses = []
        for number in range(6):
            loop.optimizer.zero_grad()
            for _ in range(2):
                loss = loop.loss()
                loss.backward()
            nn.utils.clip_grad_norm_(loop.net.parameters(), 0.5)
            loop.optimizer.param_groups[0]["lr"] = 1e-3 / (number + 1)
            if number != 2:
                loop.optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(Loop())
    with LEVER.apply(watch.subject, "8bit"):
        ours = Loop()
        losses = train(ours)
        assert ours.large["step"] == 5
    assert losses == pytest.approx(expected, rel=0.02)


@needs_torchao
def test_a_closure_or_a_scaling_kernel_takes_it_back_before_the_step(watch: Watch) -> None:
    def closed(loop: Loop) -> None:
        def closure() -> Any:
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            return loss

        loop.optimizer.step(closure)

    def scaled(loop: Loop) -> None:
        loop.optimizer.grad_scale = torch.tensor(1.0)
        loop.loss().backward()
        with contextlib.suppress(AssertionError):  # torch's own, for what is not fused
            loop.optimizer.step()

    for act, why in ((closed, "closure"), (scaled, "scaler")):
        watch.subject.incidents.clear()
        with LEVER.apply(watch.subject, "8bit"):
            ours = Loop()
            ours.steps(2)
            assert ours.in_codes
            act(ours)
            assert not ours.in_codes
            assert why in watch.subject.incidents[0][1]


@needs_torchao
def test_a_step_that_raises_leaves_the_optimizer_whole(watch: Watch) -> None:
    with LEVER.apply(watch.subject, "8bit"):
        ours = Loop()
        ours.steps(1)
        ours.optimizer.state[ours.net[0].bias]["exp_avg"] = torch.ones(7)  # the small ones are stepped by torch
        with pytest.raises(RuntimeError):
            ours.steps(1)
        assert [len(group["params"]) for group in ours.optimizer.param_groups] == [4]


@needs_torchao
def test_an_optimizer_goes_with_its_script(watch: Watch) -> None:
    with LEVER.apply(watch.subject, "8bit"):
        ours = Loop()
        ours.steps(1)
        alive = weakref.ref(ours.optimizer)
        del ours
        gc.collect()
        assert alive() is None


@needs_torchao
def test_it_saves_memory(watch: Watch) -> None:
    def held(loop: Loop) -> int:
        loop.steps(1)
        finish = follow_memory(watch.subject, "cpu")
        loop.steps(1)
        sample = finish(1)
        assert sample is not None
        return sample.held_bytes

    plain = held(Loop())
    watch.subject.modules, watch.subject.optimizers = (type(watch.subject.modules)() for _ in range(2))
    with LEVER.apply(watch.subject, "8bit"):
        moments = 2 * 4 * WIDTH * WIDTH
        assert plain - held(Loop()) > 0.6 * moments


OPEN = replace(
    SEEN,
    optimizers=(replace(SEEN.optimizers[0], low_bit_obstacle=""),),
    reads_optimizer_state="",
    gradients_zeroed=False,
)
CLOSED = replace(OPEN.optimizers[0], low_bit_obstacle="the optimizer is SGD, not torch.optim.Adam or AdamW")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (replace(OPEN, optimizers=()), "no optimizer"),
        (replace(OPEN, compiled_in_script=True), "torch.compile is already used"),
        (replace(OPEN, captures_graphs="train.py mentions CUDAGraph"), "CUDAGraph"),
        (replace(OPEN, optimizers=(CLOSED,)), "the optimizer is SGD"),
        (replace(OPEN, optimizers=SEEN.optimizers), "was not examined"),
        (replace(OPEN, reads_optimizer_state="train.py mentions exp_avg"), "exp_avg"),
        (replace(OPEN, reads_optimizer_state=None), "was not examined"),
    ],
)
def test_it_is_refused(seen: Observed, why: str) -> None:
    assert not LEVER.applies(CPU, seen)
    assert why in LEVER.applies(CPU, seen).reason


def test_it_is_offered_for_memory_alone_and_said_to_reduce() -> None:
    assert LEVER.applies(CPU, OPEN).values == ("8bit",)
    assert LEVER.applies(CPU, replace(OPEN, optimizers=(CLOSED, *OPEN.optimizers)))  # one of them is enough
    assert (LEVER.aim, LEVER.exactness, LEVER.label("8bit")) == ("memory", "reduced", "optimizer state in 8 bits")
    assert LEVER.saving(CPU, OPEN).most == 0.0


@needs_torchao
def test_what_the_optimizer_is_decides_what_is_observed(watch: Watch) -> None:
    kept = [Loop(), Loop(torch.optim.SGD), Loop(amsgrad=True)]
    for loop in kept:
        loop.steps(1)
    seen = observe(watch, threads_at_start=None, rows=()).optimizers
    assert [bool(one.low_bit_obstacle) for one in seen] == [False, True, True]
