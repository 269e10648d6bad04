"""Who holds a tensor: from the tensor upward to a name, on objects of this very file."""

from __future__ import annotations

import collections
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.memory.holders import Found, HolderSearch


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """The collector names no referrer that is: the tests' `conftest.py` freezes the variables of this file too."""
    gc.unfreeze()
    yield
    gc.freeze()


def tensors(count: int = 3) -> list[Tensor]:
    return [torch.zeros(2) for _ in range(count)]


def common(objects: list[Any], *, frames: list[Any] | None = None) -> Found | None:
    """The list of this very test holds them too, and must not count."""
    one = HolderSearch(lambda file: file == __file__, frames or [], [objects])
    return one.common(tuple(objects))


class Recorder:
    def __init__(self) -> None:
        self.history: list[Any] = []
        self.log: dict[str, list[Any]] = {"out": []}


def test_a_list_in_the_modules_globals_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = ModuleType("recorded"), tensors()
    module.__file__ = __file__
    vars(module)["HELD_GLOBALLY"] = [{"out": one} for one in made]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = common(made)
    assert found is not None
    assert (found.name, found.kind, found.type_name, found.entries) == ("HELD_GLOBALLY", "global", "list", 3)


@pytest.mark.parametrize(
    ("hold", "name", "type_name"),
    [
        (lambda keeper, made: keeper.history.extend(made), "Recorder.history", "list"),
        (lambda keeper, made: keeper.log["out"].extend(made), "Recorder.log", "list"),
    ],
)
def test_an_attribute_is_named_by_its_class(hold: Callable[..., None], name: str, type_name: str) -> None:
    made, keeper = tensors(), Recorder()
    hold(keeper, made)
    found = common(made)
    assert found is not None
    assert (found.name, found.kind, found.type_name) == (name, "attribute", type_name)
    assert found.links == (name.partition(".")[2],)


def test_a_closure_is_named_though_nothing_outside_can() -> None:
    def make() -> Callable[[Any], None]:
        seen: list[Any] = []

        def keep(one: Any) -> None:
            seen.append(one)

        return keep

    made, keep = tensors(), make()
    for one in made:
        keep(one)
    found = common(made)
    assert found is not None
    assert (found.kind, found.links) == ("closure", ("seen",))
    assert found.name.startswith("seen (closure of ")


def test_a_local_of_a_running_function_is_named() -> None:
    found = _held_by_a_local()
    assert found is not None
    assert (found.name, found.kind, found.type_name) == ("kept", "local", "deque")
    assert found.bound == "a deque of at most 5"


class Caching(torch.utils.data.Dataset[Tensor]):
    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 1000


class Trainer:
    def __init__(self, data: Caching) -> None:
        self.data = data


@pytest.mark.parametrize(
    ("cache", "bounded"),
    [
        (lambda made: dict(enumerate(made)), True),
        (lambda made: made + [None] * 997, True),
        (lambda made: {f"{number}": one for number, one in enumerate(made)}, False),
        (lambda made: {1000 + number: one for number, one in enumerate(made)}, False),
        (lambda made: list(made), False),
    ],
)
def test_a_data_sets_cache_of_its_samples_is_bounded(cache: Callable[[list[Tensor]], Any], bounded: bool) -> None:
    made = tensors()
    trainer = Trainer(Caching(cache(made)))
    found = common(made)
    assert found is not None
    assert found.name == "Caching.cache"
    assert found.bound == ("at most one entry for each of the 1,000 samples of Caching" if bounded else "")
    assert trainer


def _held_by_a_local() -> Found | None:
    made = tensors()
    kept = collections.deque(made, maxlen=5)
    found = common(made, frames=[sys._getframe()])
    assert len(kept) == 3
    return found


def test_a_cached_function_is_named_with_its_bound() -> None:
    @functools.cache
    def endless(step: int) -> Tensor:
        return torch.full((2,), float(step))

    @functools.lru_cache(maxsize=8)
    def bounded(step: int) -> Tensor:
        return torch.full((2,), float(step))

    for function, bound in ((endless, ""), (bounded, "a cache of at most 8")):
        found = common([function(step) for step in range(3)])
        assert found is not None
        assert (found.name, found.kind, found.entries) == (function.__name__, "cached function", 3)
        assert found.bound == bound


def test_a_buffer_of_a_module_bears_its_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.zeros(3))

    net = Net()
    found = common([net.get_buffer("bank")])
    assert found is not None
    assert (found.name, found.links) == ("Net.bank", ("bank",))


def test_an_optimizer_holds_what_was_added_to_it() -> None:
    class Owner:
        def __init__(self) -> None:
            self.optimizer = torch.optim.Adam([torch.zeros(2, requires_grad=True)])

    owner = Owner()
    made = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for one in made:
        owner.optimizer.add_param_group({"params": [one]})
    found = common(list(made))
    assert found is not None
    assert found.links == ("param_groups", "optimizer")


def test_a_traceback_that_is_kept_holds_the_locals_of_its_frames() -> None:
    class Errors:
        def __init__(self) -> None:
            self.kept: list[BaseException] = []

    def fail(one: Tensor) -> None:
        raise ValueError(str(one.shape))

    errors, made = Errors(), tensors()
    for one in made:
        try:
            fail(one)
        except ValueError as error:
            errors.kept.append(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    del one
    found = common(made)
    assert found is not None
    assert found.name == "Errors.kept"


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_frozen")
def test_what_nobody_of_the_script_holds_has_no_name() -> None:
    assert common([torch.zeros(2)]) is None
