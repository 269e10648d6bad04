"""What does not fit is listed by name, and nothing is changed; what fails half-way is undone."""

from __future__ import annotations

import copy
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.errors import NumericsError, UsageError
from flatout.plan import Plan
from flatout.train.step import TrainStep


def refused(state: Any, **objects: Any) -> str:
    """The text of the refusal; the objects, the generators and the state are as before."""
    before = [copy.deepcopy(one.state_dict()) for one in objects.values()]
    drawn = torch.get_rng_state(), random.getstate()
    with pytest.raises(UsageError) as caught:
        restore(state, **objects)
    for one, was in zip(objects.values(), before, strict=True):
        assert str(one.state_dict()) == str(was)
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
    return str(caught.value)


def test_names_shapes_and_dtypes_are_listed() -> None:
    saved = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(2, 2), "gone": nn.Linear(1, 1, bias=False)})
    here = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(2, 2).half(), "new": nn.Linear(1, 1, bias=False)})
    text = refused(capture(model=saved), model=here)
    assert text == (
        "the checkpoint does not fit: 1 missing: model: new.weight; 1 unexpected: model: gone.weight; "
        "2 of another shape: model: a.weight ([4, 3] saved, [5, 3] here), model: a.bias ([4] saved, [5] here); "
        "2 of another dtype: model: b.weight (float32 saved, float16 here), model: b.bias (float32 saved, float16 here)"
        "; strict=True needs the same names, shapes and dtypes; "
        "build the objects as they were when it was saved, or pass strict=False to load what fits"
    )
    differences = restore(capture(model=saved), model=here, strict=False)
    assert differences.missing == ("model: new.weight",)
    assert torch.equal(here["b"].weight, saved["b"].weight.half())  # type: ignore[operator]


def test_long_lists_are_cut() -> None:
    here = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    text = refused(capture(model=nn.Linear(1, 1)), model=here)
    assert "100 missing: model: 0.weight, " in text
    assert " and 92 more" in text
    assert len(text) < 500


def test_sections_and_parts_that_are_not_there() -> None:
    one = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    text = refused(capture(model=one, extra=1), model=one, optimizer=optimizer)
    assert "1 missing: optimizer (the checkpoint holds model, extra, generators)" in text
    with pytest.raises(UsageError, match=r"1 missing: model\['b'\]; 1 unexpected: model\['c'\]"):
        restore(capture(model={"a": one, "c": one}), model={"a": one, "b": one})


def adamw(*shapes: int) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters)
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    return optimizer


def test_an_optimizer_over_other_parameters() -> None:
    saved = capture(optimizer=adamw(2, 3))
    assert "optimizer was saved with 1 group of 2 parameters; the optimizer here has 1 group of 3 parameters" in (
        refused(saved, optimizer=adamw(2, 3, 4))
    )
    text = refused(saved, optimizer=adamw(3, 2))
    assert "optimizer: exp_avg of parameter 0 ([2] saved, [3] here)" in text
    assert "optimizer: exp_avg_sq of parameter 1 ([3] saved, [2] here)" in text


def test_another_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(2))
    text = refused(capture(optimizer=adamw(2)), optimizer=torch.optim.SGD([parameter], 0.1))
    assert "missing: optimizer: group 0: momentum" in text
    assert "unexpected: optimizer: group 0: betas" in text
    assert "is not saved as an optimizer's state" in refused({"optimizer": {"a": 1}}, optimizer=adamw(2))


def test_moments_of_another_shape_are_left_as_they_were() -> None:
    def trained(classes: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, classes))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (saved, its_optimizer), (here, optimizer) = trained(2), trained(5)
    own = optimizer.state[here[1].bias]["exp_avg"].clone()
    differences = restore(capture(model=saved, optimizer=its_optimizer), model=here, optimizer=optimizer, strict=False)
    assert "optimizer: exp_avg of parameter 3 ([2] saved, [5] here)" in differences.shapes
    assert torch.equal(optimizer.state[here[0].bias]["exp_avg"], its_optimizer.state[saved[0].bias]["exp_avg"])
    assert torch.equal(optimizer.state[here[1].bias]["exp_avg"], own)
    optimizer.step()


def test_of_another_optimizer_no_state_is_taken() -> None:
    def made(kind: str) -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return {
            "sgd": lambda: torch.optim.SGD([parameter], 0.1, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW([parameter], 0.2),
            "adagrad": lambda: torch.optim.Adagrad([parameter], 0.3),
        }[kind]()

    for kind, other in (("sgd", "adamw"), ("adamw", "sgd"), ("sgd", "adagrad"), ("adagrad", "adamw")):
        saved, here = made(kind), made(other)
        saved.step()
        assert restore(capture(optimizer=saved), optimizer=here, strict=False)
        assert here.param_groups[0]["lr"] == saved.param_groups[0]["lr"]
        here.step()
        assert (
            here.state[here.param_groups[0]["params"][0]].keys()
            != saved.state[saved.param_groups[0]["params"][0]].keys()
        )


class Kept(torch.optim.Optimizer):
    """Keeps a tensor of each parameter and no dict of them, or a scalar by a name that torch has for other things."""

    def __init__(self, parameters: Any, name: str = "") -> None:
        super().__init__(parameters, {})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if self.name:
                self.state[parameter] = {self.name: torch.tensor(0.5)}
            else:
                self.state[parameter] = self.state.get(parameter, torch.zeros_like(parameter)).add_(1)


@pytest.mark.parametrize("name", ["", "step_size"])
def test_optimizers_that_keep_what_torchs_do_not(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    saved, here = Kept([parameter], name), Kept([parameter], name)
    saved.step()
    state = capture(optimizer=saved)
    for _ in range(2):  # what was restored is not the state itself
        assert not restore(state, optimizer=here)
        assert str(here.state_dict()) == str(saved.state_dict())
        here.step()
    other = Kept([nn.Parameter(torch.ones(2))], name)
    other.step()
    del state["optimizer"]["state"][0]  # type: ignore[index]
    assert not restore(state, optimizer=other)
    assert not other.state


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_moments_in_8_bits_are_left_as_they_were() -> None:
    def trained(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 128)
        optimizer = kind(model.parameters())  # type: ignore[call-arg]
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    (_, saved), (model, optimizer) = trained(torch.optim.RAdam), trained(torch.optim.AdamW)
    step = TrainStep(model, optimizer, lambda model, x: model(x).sum(), Plan(optimizer_state="8bit"))
    before = optimizer.state_dict()["state"]
    assert restore(capture(optimizer=saved), optimizer=optimizer, strict=False)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[0][name], after[0][name]) for name in ("exp_avg", "exp_avg_sq"))
    step.close()


def test_adam_is_not_adamw() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for saved, here in ((torch.optim.AdamW, torch.optim.Adam), (torch.optim.Adam, torch.optim.AdamW)):
        state, optimizer = capture(optimizer=saved([parameter])), here([parameter])
        assert "unexpected: optimizer: group 0: decoupled_weight_decay" in refused(state, optimizer=optimizer)
        own = optimizer.param_groups[0]["decoupled_weight_decay"]
        restore(state, optimizer=optimizer, strict=False)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is own


def test_an_optimizer_keeps_its_way_of_computing_and_takes_the_rest() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    saved = capture(optimizer=torch.optim.AdamW(parameters, lr=0.5, fused=True))
    here = torch.optim.AdamW(parameters, foreach=True)
    assert not restore(saved, optimizer=here)
    assert {key: here.param_groups[0][key] for key in ("lr", "fused", "foreach")} == {
        "lr": 0.5,
        "fused": None,
        "foreach": True,
    }


class WideMoments(torch.optim.Optimizer):
    """Keeps fp32 moments of bf16 weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            self.state[one]["moment"] = torch.full(one.shape, 1 / 3)


def test_state_keeps_the_dtype_that_it_was_saved_with(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    one, other = WideMoments([parameter]), WideMoments([parameter])
    one.step()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(capture(optimizer=one), step=1)
    restore(checkpoints.at(1), optimizer=other)
    assert torch.equal(other.state[parameter]["moment"], torch.full((2,), 1 / 3))


class Fragile:
    """Changes itself, then fails."""

    def __init__(self) -> None:
        self.values = [1]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.extend(state["values"])
        if len(state["values"]) > 1:
            raise KeyError("no such shard")
        self.values = list(state["values"])


def test_a_failure_of_the_users_own_code_is_undone_and_placed() -> None:
    model, data, scheduler = nn.Linear(2, 2), Fragile(), Fragile()
    other = nn.Linear(2, 2)
    state = capture(model=other, data=data, scheduler=scheduler)
    state["data"], state["scheduler"] = {"values": [5]}, {"values": [6, 7]}
    weight, drawn = model.weight.clone(), torch.get_rng_state()
    with pytest.raises(KeyError, match="no such shard") as caught:
        restore(state, model=model, data=data, scheduler=scheduler)
    assert caught.value.__notes__ == ["while restoring scheduler; what was restored before it has been undone"]
    assert (data.values, scheduler.values) == ([1], [1])
    assert torch.equal(model.weight, weight)
    assert torch.equal(drawn, torch.get_rng_state())


def test_objects_without_a_state() -> None:
    with pytest.raises(UsageError, match=r"data is 3; it has state_dict\(\)"):
        capture(data=3)
    with pytest.raises(UsageError, match=r"data is 3; it has state_dict\(\) and load_state_dict\(\)"):
        restore({"data": 3}, data=3)


def test_a_model_without_memory() -> None:
    saved = capture(model=nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"weight is on the meta device; .*to_empty"):
        restore(saved, model=nn.Linear(2, 2, device="meta"))


def test_a_lazy_model_takes_its_shapes_from_the_checkpoint() -> None:
    saved, lazy = nn.Linear(3, 2), nn.LazyLinear(2)
    restore(capture(model=saved), model=lazy)
    assert torch.equal(lazy.weight, saved.weight)


def test_extra_state_of_a_module() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    one, other = Counting(1, 1), Counting(1, 1)
    one.count = 4
    assert not restore(capture(model=one), model=other)
    assert other.count == 4


@pytest.mark.parametrize("broken", [{}, {"python": (3, (1,), None), "torch": torch.zeros(3, dtype=torch.uint8)}])
def test_generators_that_do_not_fit(broken: Any) -> None:
    model = nn.Linear(1, 1)
    state = capture(model=nn.Linear(1, 1)) | {"generators": broken}
    text = refused(state, model=model)
    assert "generators=False" in text
    restore(state, model=model, generators=False)


def test_a_model_can_be_restored_without_the_rest(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoints.save(capture(model=model, optimizer=optimizer, data=Fragile()), step=1)
    fresh = nn.Linear(2, 2)
    assert not restore(checkpoints.at(1), model=fresh, generators=False)
    assert torch.equal(fresh.weight, model.weight)


def test_another_scheduler_is_refused() -> None:
    def parts(kind: Any, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, kind(optimizer, **settings)

    schedules = torch.optim.lr_scheduler
    model, optimizer, scheduler = parts(schedules.MultiStepLR, milestones=[3])
    state = capture(model=model, optimizer=optimizer, scheduler=scheduler)
    model, optimizer, scheduler = parts(schedules.CosineAnnealingLR, T_max=5)
    with pytest.raises(UsageError, match="T_max of CosineAnnealingLR"):
        restore(state, model=model, optimizer=optimizer, scheduler=scheduler)


def test_a_model_with_a_way_of_its_own_to_load() -> None:
    class Own(nn.Linear):
        def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
            return super().load_state_dict(state)

    saved, fresh = Own(2, 2), Own(2, 2)
    restore(capture(model=saved), model=fresh)
    assert torch.equal(saved.weight, fresh.weight)


@pytest.mark.parametrize(
    ("saved", "here"), [("Adam", "RAdam"), ("RAdam", "Adam"), ("NAdam", "RAdam"), ("Adamax", "AdamW")]
)
def test_optimizers_with_the_same_options_are_told_apart(saved: str, here: str) -> None:
    def optimizer(name: str) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2))], 0.1)
        made.param_groups[0]["params"][0].grad = torch.ones(2)
        made.step()
        return made

    state = capture(optimizer=optimizer(saved))
    text = refused(state, optimizer=optimizer(here))
    assert f"the state of another optimizer ({saved} saved, {here.removesuffix('W')} here)" in text
    assert not restore(state, optimizer=optimizer(saved))


def test_an_optimizer_derived_from_one_of_torchs_takes_its_state() -> None:
    class Own(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.ones(2))
    state = capture(optimizer=torch.optim.SGD([parameter], 0.1))
    assert not restore(state, optimizer=Own([parameter], 0.1))
    del state["optimizer"]["kind"]  # type: ignore[attr-defined]  # as an earlier version saved it
    assert not restore(state, optimizer=Own([parameter], 0.1))


def gan() -> tuple[TrainStep, TrainStep]:
    """A discriminator's step and its generator's."""

    def discriminator_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(batch) - model(generator(batch).detach())).mean()
        return loss

    def generator_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = -discriminator(model(batch)).mean()
        return loss

    discriminator, generator = nn.Linear(3, 1), nn.Linear(3, 3)
    losses = ((discriminator, discriminator_loss), (generator, generator_loss))
    first, second = (TrainStep(model, torch.optim.Adam(model.parameters()), loss) for model, loss in losses)
    return first, second


def test_a_further_step_is_saved_with_all_that_it_trains() -> None:
    batch = torch.ones(4, 3)
    discriminator, generator = gan()
    for step in (discriminator, generator, discriminator, generator):
        step(batch)
    state = copy.deepcopy(capture(discriminator, generator=generator))
    discriminator_restored, generator_restored = gan()
    restore(state, discriminator_restored, generator=generator_restored)
    assert generator_restored.steps == 2
    for step, restored in 2 * ((discriminator, discriminator_restored), (generator, generator_restored)):
        assert torch.equal(step(batch), restored(batch))
    models = generator.model, generator_restored.model
    for one, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, expected)
    restore(
        capture(discriminator, both=[generator, discriminator]),
        discriminator_restored,
        both=[generator_restored, discriminator_restored],
    )

    with torch.no_grad():
        generator.model.weight.fill_(torch.nan)  # type: ignore[operator, union-attr]
    with pytest.raises(NumericsError, match="weights are not finite"):
        capture(discriminator, steps_of={"generator": generator})
