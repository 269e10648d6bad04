"""SIGTERM and Ctrl-C in `fit`: in a step, waiting for data, in an evaluation; all saved, the same weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from flatout.checkpoint.folder import Checkpoints
from flatout.data import given_batches
from flatout.data.batches import batches
from flatout.train.fit import fit
from flatout.train.interruption import stop_on_signals
from flatout.train.loss import supervised
from flatout.train.step import TrainStep

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)
BOTH = pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "Ctrl-C"]
)


def training() -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    return TrainStep(model, torch.optim.AdamW(model.parameters(), 0.01), supervised(nn.CrossEntropyLoss()))


def weights(step: TrainStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.model.parameters()])


def ask(number: int) -> None:
    os.kill(os.getpid(), number)


class Samples(IterableDataset[Any]):
    """Calls a function before it gives sample `at` of the first epoch."""

    def __init__(self, at: int = -1, then: Callable[[], None] | None = None) -> None:
        self.at, self.then = at, then

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(X)):
            if i == self.at and self.then is not None:
                then, self.then = self.then, None
                then()
            yield X[i], Y[i]


def undisturbed(source: Any) -> torch.Tensor:
    step = training()
    fit(step, source, epochs=2)
    return weights(step)


@BOTH
def test_in_a_step(tmp_path: Path, number: int, raised: type[BaseException]) -> None:
    step, inner = training(), supervised(nn.CrossEntropyLoss())

    def loss_fn(model: Any, batch: Any) -> Any:
        if step.steps == 4:
            ask(number)
        return inner(model, batch)

    step.loss_fn = loss_fn
    before = signal.getsignal(number)
    with pytest.raises(raised):
        fit(step, batches((X, Y), 8, seed=3), epochs=2, checkpoints=tmp_path)
    assert signal.getsignal(number) is before
    assert (step.steps, saved(tmp_path)) == (5, 5)
    again = training()
    found = fit(again, batches((X, Y), 8, seed=3), epochs=2, checkpoints=tmp_path)
    assert (found.resumed_at_step, found.steps) == (5, 1)
    assert torch.equal(weights(again), undisturbed(batches((X, Y), 8, seed=3)))


@BOTH
def test_while_waiting_for_data(tmp_path: Path, number: int, raised: type[BaseException]) -> None:
    """The data set would wait for ever, and swallows every Exception."""

    def wait() -> None:
        threading.Timer(0.05, ask, (number,)).start()
        while True:
            try:
                threading.Event().wait()
            except Exception:
                continue

    with pytest.raises(raised):
        fit(training(), batches(Samples(13, wait), 8), epochs=2, checkpoints=tmp_path)
    assert saved(tmp_path) == 1
    again = training()
    assert fit(again, batches(Samples(), 8), epochs=2, checkpoints=tmp_path).steps == 5
    assert torch.equal(weights(again), undisturbed(batches(Samples(), 8)))


class Drawn:
    """Batches of the user's own, with noise; calls a function in the middle of making the third one of an epoch."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.then = then

    def __iter__(self) -> Iterator[Any]:
        for at in range(4):
            noise = torch.rand(6, 4)
            if at == 2 and self.then is not None:
                self.then()
            yield X[6 * at : 6 * at + 6] + noise * torch.rand(()), Y[6 * at : 6 * at + 6]


def test_random_draws_for_a_batch_that_was_broken_off_are_drawn_again(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(training(), Drawn(lambda: ask(signal.SIGTERM)), epochs=1, checkpoints=tmp_path)
    assert saved(tmp_path) == 2
    whole, again = training(), training()
    fit(whole, Drawn(), epochs=1)
    assert fit(again, Drawn(), epochs=1, checkpoints=tmp_path).steps == 2
    assert torch.equal(weights(again), weights(whole))


@BOTH
def test_in_an_evaluation(tmp_path: Path, number: int, raised: type[BaseException]) -> None:
    """It is finished, so that its figures rank the checkpoint."""

    def evaluation() -> dict[str, float]:
        ask(number)
        return {"loss": 0.5}

    with pytest.raises(raised):
        fit(training(), batches((X, Y), 8), epochs=2, evaluation=evaluation, checkpoints=tmp_path)
    best = Checkpoints(tmp_path).best()
    assert best is not None
    assert (best.step, best.metric) == (3, 0.5)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    def evaluation() -> dict[str, float]:
        ask(signal.SIGINT)
        ask(signal.SIGTERM)  # no second Ctrl-C
        ask(signal.SIGINT)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        fit(training(), batches((X, Y), 8), epochs=2, evaluation=evaluation, checkpoints=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_with_a_shells_number() -> None:
    with stop_on_signals() as stop:
        ask(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        stop.leave(3)
    assert left.value.code == 143


def test_a_programs_own_handler_of_ctrl_c_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with stop_on_signals() as stop:
            ask(signal.SIGINT)
            assert (heard, stop.requested) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_others_wait_nothing_is_broken_off() -> None:
    with stop_on_signals(breaks_off=False) as stop:
        assert stop.waiting(lambda: (ask(signal.SIGTERM), time.sleep(0), "data")[-1]) == "data"
        assert stop.requested


def test_weights_that_are_lost_are_not_saved_on_the_way_out(tmp_path: Path) -> None:
    step = training()
    fit(step, batches((X, Y), 8), epochs=1, checkpoints=tmp_path)
    with torch.no_grad():
        next(step.model.parameters()).fill_(float("nan"))
    with pytest.warns(UserWarning, match="nothing was saved: the weights are not finite"), pytest.raises(SystemExit):
        fit(step, batches(Samples(0, lambda: ask(signal.SIGTERM)), 8), epochs=1)
    assert saved(tmp_path) == 3


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[Any] = []

    def run() -> None:
        fit(training(), batches((X, Y), 8), epochs=1)
        found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def saved(folder: Path) -> int:
    latest = Checkpoints(folder).latest()
    assert latest is not None
    return latest.step


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_processes_that_are_forked_meanwhile_can_be_ended() -> None:
    """They have a copy of the handlers, in which nobody looks whether a stop was requested."""
    ended: list[int | None] = []

    def evaluation() -> dict[str, float]:
        for number in (signal.SIGTERM, signal.SIGINT):
            ready, told = os.pipe()
            child = os.fork()
            if not child:
                try:
                    os.write(told, b".")
                    time.sleep(20)
                except KeyboardInterrupt:
                    os._exit(7)
                os._exit(0)
            os.read(ready, 1)
            os.kill(child, number)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return {"loss": 1.0}

    fit(training(), batches((X, Y), 8), epochs=1, evaluation=evaluation)
    assert ended == [-signal.SIGTERM, 7]


def test_a_batch_that_was_just_handed_out_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, calls = given_batches.countable_samples, []

    def counting(batch: Any) -> int | None:
        calls.append(batch)
        if len(calls) == 2:
            ask(signal.SIGTERM)
        return counted(batch)

    data = [(X[at : at + 8], Y[at : at + 8]) for at in (0, 8, 16)]
    whole, again = training(), training()
    fit(whole, data, epochs=1)
    monkeypatch.setattr(given_batches, "countable_samples", counting)
    with pytest.raises(SystemExit):
        fit(training(), data, epochs=1, checkpoints=tmp_path)
    assert saved(tmp_path) == 1
    assert fit(again, data, epochs=1, checkpoints=tmp_path).steps == 2
    assert torch.equal(weights(again), weights(whole))
