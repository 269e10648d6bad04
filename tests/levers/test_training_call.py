"""Levers act on the calls that train, as trials have seen them; everything else runs as the script has it."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.levers.autocast import Autocast
from flatout.levers.lever import Lever
from flatout.levers.model_call import set_call, set_training_call
from flatout.levers.subject import Subject
from flatout.script.watch import Watch


class Net(nn.Module):
    """Keeps what it saw, as scripts do."""

    kept: Tensor

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 2), reentrant
        self.dtypes: list[torch.dtype] = []

    def inner(self, x: Tensor) -> Tensor:
        self.kept = torch.relu(self.a(x))
        self.dtypes.append(self.kept.dtype)
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.b(self.inner(x))
        return self.b(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@contextlib.contextmanager
def trained(watch: Watch, model: nn.Module, lever: Lever, value: Any, steps: int = 3) -> Iterator[torch.optim.SGD]:
    """A first plain step, then steps under the lever, which stays on until the context ends."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with contextlib.ExitStack() as stack:
        for step in range(steps):
            if step == 1:
                stack.enter_context(lever.apply(watch.subject, value))
            optimizer.zero_grad()
            model(torch.randn(4, 8, requires_grad=True)).square().mean().backward()
            optimizer.step()
        yield optimizer


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_checkpointed_part_is_recomputed_as_it_was_computed(watch: Watch, reentrant: bool | None) -> None:
    model = Net(reentrant)
    with trained(watch, model, Autocast(), "bf16"):
        once = 2 if reentrant else 1  # the other kind stops as soon as it has what it needs
        assert set(model.dtypes[:once]) == {torch.float32}
        assert set(model.dtypes[once:]) == {torch.bfloat16}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_of_the_model_is_recomputed_as_it_was_computed(watch: Watch, reentrant: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with contextlib.ExitStack() as stack:
        for step in range(3):
            if step == 1:
                stack.enter_context(Autocast().apply(watch.subject, "bf16"))
                model.dtypes.clear()
            optimizer.zero_grad()
            x = torch.randn(4, 8, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
        assert set(model.dtypes) == {torch.float32 if reentrant else torch.bfloat16}


class Doubled:
    """A call put in place of a block's own, which saves other tensors for backward than that does."""

    @contextlib.contextmanager
    def apply(self, subject: Subject) -> Iterator[None]:
        def visit(module: Any) -> Any:
            set_training_call(subject, module.a, lambda x: module.a._call_impl(x).exp().log(), module.a._call_impl)
            return lambda module: set_call(module.a, None)

        with subject.modules.each(visit):
            yield


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_call_in_place_of_a_blocks_own_is_recomputed_too(watch: Watch, reentrant: bool | None) -> None:
    model = Net(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with contextlib.ExitStack() as stack:
        for step in range(3):
            if step == 1:
                stack.enter_context(Doubled().apply(watch.subject))
            optimizer.zero_grad()
            model(torch.randn(4, 8, requires_grad=True)).square().mean().backward()
            optimizer.step()


def test_evaluation_and_what_follows_training_are_plain(watch: Watch) -> None:
    model = Net()
    x = torch.randn(4, 8)
    with trained(watch, model, Autocast(), "bf16"):
        model.dtypes.clear()
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.a(x)  # a part by itself
        torch.func.vmap(model)(x)
        with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
            torch.jit.trace(model, x)
        torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))(x)
        assert set(model.dtypes) <= {torch.float32}
        model.train()
        model(x)
        assert model.dtypes[-1] == torch.bfloat16


def test_what_the_model_keeps_can_be_read_by_numpy(watch: Watch) -> None:
    model = Net()
    with trained(watch, model, Autocast(), "bf16"):
        assert model.kept.dtype == torch.bfloat16
        assert model.kept.detach().numpy().dtype == "float32"
    with pytest.raises(TypeError, match="BFloat16"):
        model.kept.detach().numpy()


def test_autocast_of_the_scripts_own_is_left_to_it(watch: Watch) -> None:
    model = Net()
    with trained(watch, model, Autocast(), "bf16"), torch.autocast("cpu", torch.float16):
        assert model(torch.randn(4, 8)).dtype == torch.float16


def test_an_exception_of_the_scripts_passes_through_and_nothing_runs_twice(watch: Watch) -> None:
    class Stop(Exception):
        pass

    model, taken = Net(), []

    def stop(module: Any, args: Any, out: Tensor) -> None:
        taken.append(out)
        raise Stop

    with trained(watch, model, Autocast(), "bf16"):
        state = torch.get_rng_state()
        with model.a.register_forward_hook(stop), contextlib.suppress(Stop):
            model(torch.randn(4, 8))
        assert len(taken) == 1
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        torch.randn(4, 8)
        assert torch.equal(torch.get_rng_state(), after)
        model(torch.randn(4, 8))
        assert model.dtypes[-1] == torch.bfloat16  # the lever is on as before


def test_copies_of_a_model_know_nothing_of_levers(watch: Watch) -> None:
    model = Net()
    with trained(watch, model, Autocast(), "bf16"):
        del model.kept
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is Net
            assert sorted(vars(other)) == sorted(vars(Net()))
