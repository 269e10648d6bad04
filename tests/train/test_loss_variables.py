"""Copies of a loss function keep what it carries from call to call to themselves, and the user's stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.train import loss_variables
from flatout.train.loss_variables import with_own_variables
from flatout.tuning.step_tuning import copies_of

Made = tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[], Tensor | None]]
"""A loss function that carries a state, and what reads the state."""

carried: Tensor | None = None


def advanced(model: nn.Module, batch: Tensor, state: Tensor | None) -> Tensor:
    out: Tensor = model(batch)
    return out if state is None or state.shape != out.shape else out + state.detach()


def in_a_global() -> Made:
    global carried
    carried = None

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        global carried
        carried = advanced(model, batch, carried)
        return carried.square().mean()

    return loss_fn, lambda: carried


def in_an_enclosing_function() -> Made:
    state: Tensor | None = None

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal state
        state = advanced(model, batch, state)
        return state.square().mean()

    return loss_fn, lambda: state


def in_a_dict() -> Made:
    state: dict[str, Tensor] = {}

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        state["h"] = advanced(model, batch, state.get("h"))
        return state["h"].square().mean()

    return loss_fn, lambda: state.get("h")


def in_a_list() -> Made:
    state: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        state[:] = [advanced(model, batch, state[0] if state else None)]
        return state[0].square().mean()

    return loss_fn, lambda: state[0] if state else None


def in_an_object() -> Made:
    state = SimpleNamespace(calls=0)

    def loss_fn(scale: float, model: nn.Module, batch: Tensor) -> Tensor:
        state.calls += 1
        state.h = advanced(model, batch, getattr(state, "h", None))
        return state.h.square().mean() * scale

    return partial(loss_fn, 1.0), lambda: getattr(state, "h", None)


KINDS = [in_a_global, in_an_enclosing_function, in_a_dict, in_a_list, in_an_object]


def made(loss_fn: Any) -> flatout.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return flatout.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", [False, True])
def test_forecasts_leave_the_state_of_a_step(kind: Callable[[], Made], begun: bool) -> None:
    batch = torch.ones(4, 3)
    undisturbed = made(kind()[0])
    losses = [float(undisturbed(batch)) for _ in range(3)][begun:]
    loss_fn, state = kind()
    step = made(loss_fn)
    if begun:
        step(batch)
    before = state()
    flatout.forecast(step, batch)
    flatout.forecast(step, batch, batch_size=64)
    flatout.largest_batch(step, batch, limit="1 MiB", at_most=8, progress=lambda line: None)
    assert state() is before
    assert [float(step(batch)) for _ in losses] == losses


@pytest.mark.parametrize("kind", KINDS)
def test_copies_continue_from_the_state_independently(kind: Callable[[], Made]) -> None:
    loss_fn, state = kind()
    step, batch = made(loss_fn), torch.ones(4, 3)
    step(batch)
    before = state()
    copies = [copies_of(step.model, step.optimizer, step.loss_fn) for _ in range(2)]
    losses = [[float(loss(model, batch).detach()) for _ in range(3)] for model, _, loss in copies]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    again = copy.deepcopy(copies[0][2])  # of a trial after its first steps
    fourth = again(copies[0][0], batch)
    assert torch.equal(fourth, copies[0][2](copies[0][0], batch))
    assert fourth.item() not in losses[0]
    assert state() is before
    assert [float(loss_fn(copies[0][0], batch).detach()) for _ in range(3)] == losses[0]


def test_a_function_without_variables_is_left_as_it_is() -> None:
    def plain(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.relu(model(batch)).mean()

    supervised = flatout.supervised(nn.CrossEntropyLoss())
    assert with_own_variables(plain) is plain
    assert with_own_variables(supervised) is supervised


def test_metrics_and_terms_of_the_function_stay() -> None:
    loss_fn, _ = in_a_dict()
    loss_fn.count_terms = len  # type: ignore[attr-defined]
    assert with_own_variables(loss_fn).count_terms is len  # type: ignore[attr-defined]


def test_what_is_too_long_to_copy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_variables, "MOST_ENTRIES", 2)
    history: list[float] = [0.0, 0.0]

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        history.append(0.0)
        loss: Tensor = model(batch).mean()
        return loss

    own = with_own_variables(loss_fn)
    for _ in range(3):
        own(nn.Linear(3, 3), torch.ones(4, 3))
    assert len(history) == 2
    history.append(0.0)
    assert with_own_variables(loss_fn) is loss_fn
