"""A resumed run is the run that was never interrupted, to the bit; compiled or not, wrapped or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore


class Order:
    """Where a run stands in its data."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        return torch.randn(8, 3, 6, 6, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Run:
    """AdamW in two groups, a scheduler, dropout, BatchNorm, a scaler, and random numbers of every kind."""

    def __init__(self, layout: torch.memory_format, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 2)]
        self.model = nn.Sequential(*layers).to(memory_format=layout)
        bias = [p for p in self.model.parameters() if p.ndim == 1]
        rest = [p for p in self.model.parameters() if p.ndim > 1]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": bias, "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups, amsgrad=True, **options)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=50)
        self.scheduler = [one_cycle, torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.data = Order()
        self.losses: list[float] = []

    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "data")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            images = self.data.next() + random.random() + np.random.rand()
            loss = self.model(images).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler[0].step()
            self.scheduler[1].step(float(loss.detach()))
            losses.append(float(loss.detach()))
        return losses


@pytest.mark.parametrize(
    ("asynchronous", "layout", "options"),
    [
        (False, torch.contiguous_format, {}),
        (True, torch.contiguous_format, {"fused": True}),
        (False, torch.channels_last, {"foreach": True}),
        (True, torch.channels_last, {"fused": True}),
    ],
    ids=str,
)
def test_resuming_is_bit_identical(
    tmp_path: Path, asynchronous: bool, layout: torch.memory_format, options: dict[str, Any]
) -> None:
    through = Run(layout, **options)
    expected = through.train(5)
    with Checkpoints(tmp_path, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(capture(**through.parts()), step=5)
        expected = through.train(5)
    resumed = Run(layout, **options)
    resumed.train(2)
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    for _ in range(2):  # the state can be restored again: loading it gave none of its tensors away
        assert not restore(loaded, **resumed.parts())
        assert resumed.train(5) == expected
        assert_same(resumed.model.state_dict(), through.model.state_dict())
        assert_same(resumed.optimizer.state_dict(), through.optimizer.state_dict())
        moments = resumed.optimizer.state[resumed.model[0].weight]["exp_avg"]
        assert moments.stride() == resumed.model[0].weight.stride()
        resumed.train(1)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


class Blocks(nn.Module):
    """With a layer that really is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.module = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.module(x)
        return out


def plain() -> nn.Module:
    return Blocks()


def compiled_whole() -> Any:
    return torch.compile(Blocks(), backend="eager")


def compiled_blocks() -> nn.Module:
    model = Blocks()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    return model


def compiled_twice() -> Any:
    return torch.compile(compiled_blocks(), backend="eager")


def parallel() -> nn.Module:
    return nn.DataParallel(compiled_blocks())


KINDS = [plain, compiled_whole, compiled_blocks, compiled_twice, parallel]


@pytest.mark.parametrize("saving", KINDS)
@pytest.mark.parametrize("loading", KINDS)
def test_compiled_and_wrapped_models_load_into_one_another(tmp_path: Path, saving: Any, loading: Any) -> None:
    one, other = saving(), loading()
    state = capture(model=one)
    assert set(state["model"]) == set(Blocks().state_dict())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, step=1)
    assert not restore(checkpoints.at(1), model=other)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(one(x).cpu(), other(x).cpu())  # DataParallel moves a model to the GPU, where there is one


def test_ddp(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(Blocks())
        state = capture(model=torch.compile(wrapped, backend="eager"))
        assert set(state["model"]) == set(Blocks().state_dict())
        model = Blocks()
        assert not restore(state, model=model)
        assert torch.equal(model.module.weight, wrapped.module.module.weight)
    finally:
        torch.distributed.destroy_process_group()


def test_a_raw_state_dict_with_prefixes_loads() -> None:
    one, other = compiled_twice(), Blocks()
    saved = {f"module.{name}": value for name, value in one.state_dict().items()}
    assert not restore({"model": saved}, model=other)
    assert torch.equal(other.module.weight, one.module.weight)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> Any:
        model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    one, other = tied(), tied()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(capture(model=one), step=1)
    assert not restore(checkpoints.at(1), model=other)
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, one["head"].weight)
    (file,) = tmp_path.glob("*/model.safetensors")
    assert file.stat().st_size < 2 * one["head"].weight.nbytes + 200


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def pair() -> dict[str, Any]:
        models = {"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)}
        return {"model": models, "optimizer": [torch.optim.SGD(one.parameters(), 0.1) for one in models.values()]}

    one, other = pair(), pair()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(capture(**one), step=1)
    assert not restore(checkpoints.at(1), **other)
    assert torch.equal(other["model"]["d"].weight, one["model"]["d"].weight)


def test_generators_may_be_left_alone() -> None:
    state = capture()
    drawn = torch.rand(1), random.random(), np.random.rand()
    restore(state, generators=False)
    assert torch.rand(1) != drawn[0]
    restore(state)
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn
