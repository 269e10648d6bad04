"""From live objects to a state: one nested dict, which `Checkpoints.save` stores and `restore` puts back.

{"model": ..., "optimizer": ..., "scheduler": ..., "scaler": ..., "step": ..., "data": ..., "plan": TOML, "extra": ...,
 "objects": {name: ...}, "generators": ...}          a section that was not given is not there
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch

from flatout.arguments import as_plan, wrong
from flatout.checkpoint.model_names import plain_names
from flatout.checkpoint.optimizers import plain_state
from flatout.checkpoint.parts import part_of
from flatout.checkpoint.rank_generators import states_of_ranks
from flatout.data.nested import map_leaves
from flatout.errors import UsageError
from flatout.parallel.whole_tensors import CutTensor, is_distributed, parts_kept
from flatout.plan import Plan


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and restored: a module, an optimizer, a scheduler, anything with these two methods."""

    def state_dict(self) -> object:
        """Its state: nested dicts, lists and tuples of tensors, arrays, numbers and texts."""

    @property
    def load_state_dict(self) -> Callable[..., object]:
        """A method that takes what `state_dict` returned."""


Live: TypeAlias = "Stateful | Sequence[Live] | Mapping[str, Live]"
"""One such object, or a list or dict of them."""


class Step(Protocol):
    """A TrainStep, as far as `capture` needs it."""

    plan: Plan

    def sections(self) -> Mapping[str, object]: ...

    def check_finite(self) -> bool: ...


SECTIONS = ("model", "optimizer", "scheduler", "scaler", "step", "data", "plan", "extra", "objects", "generators")
RESTORE_ONLY = ("source", "strict")
"""Parameters of `restore` that `capture` has not."""


def capture(
    step: Step | None = None,
    data: Live | None = None,
    *,
    model: Live | None = None,
    optimizer: Live | None = None,
    scheduler: Live | None = None,
    scaler: Live | None = None,
    plan: Plan | None = None,
    extra: object = None,
    **objects: Live | None,
) -> dict[str, object]:
    """The state of a run, with that of every random number generator, on every rank.

    capture(step, train, ema=averaged)    # a TrainStep with all that it trains, its data, and further objects

    `step`, a TrainStep, stands for its model, optimizer, schedule, plan and its own state (steps taken, loss scaling);
    a run that is restored from it continues bit for bit. Without one give what there is by name.

    Where torch.distributed runs, call it on all ranks, equally often: each gives its random states, and rank 0, whose
    state is the one to save, waits for them. Of tensors that are spread over the ranks ('fsdp') each gives its part;
    a saved checkpoint has the whole, so that a run may continue with any number of ranks. If one does not arrive within
    300 s, rank 0 raises UsageError naming it.

    Each of model, optimizer, scheduler, scaler, data (the position in the data) and of `objects` is an object
    with state_dict(), or a list or dict of such; a further TrainStep among `objects`, as a GAN has one, stands for all
    that it trains too. `extra` is any nested value of the user's. Tensors are the live ones, not copies: save the state
    before the next step (moments held in 8 bits are given as fp32 copies).

    Raises UsageError for an object without state_dict(), NumericsError where weights that `step` trains are inf or NaN.
    """
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    live = live_sections(step, data, given, objects)
    if step is not None:
        step.check_finite()
        plan = plan or step.plan
    for further in _steps_in(objects):
        further.check_finite()
    state = {name: _each(one, name) for name, one in live.items()}
    if plan is not None:
        state["plan"] = as_plan(plan).to_toml()
    if extra is not None:
        state["extra"] = extra
    state["generators"] = states_of_ranks(live.get("model"))
    return state


def live_sections(
    step: object, data: object, given: Mapping[str, object], objects: Mapping[str, object]
) -> dict[str, object]:
    """Section -> the live objects, of what `capture` and `restore` are given. UsageError where they conflict."""
    found = {} if step is None else _of_step(step)
    for name, one in given.items():
        if one is not None and name in found:
            limit = "the step holds its own"
            raise UsageError(f"{name} is given as well as step", limit=limit, remedy=f"leave {name} out")
        if one is not None:
            found[name] = one
    if data is not None:
        found["data"] = data
    check_object_names(objects)
    named = {name: _whole(one) for name, one in objects.items() if one is not None}
    return found | ({"objects": named} if named else {})


def _of_step(step: object) -> dict[str, object]:
    if (sections := _sections_of(step)) is None:
        remedy = "give a model as model=..., a number of steps as extra=..."
        raise wrong("step", step, "it is a TrainStep", remedy)
    return dict(sections())


def _whole(live: object) -> object:
    """The same with all that a further TrainStep trains in its place, as a GAN's other one: alone it has but counts."""
    if isinstance(live, Mapping):
        return {key: _whole(one) for key, one in live.items()}
    if isinstance(live, list | tuple):
        return [_whole(one) for one in live]
    return live if (sections := _sections_of(live)) is None else dict(sections())


def _steps_in(live: object) -> Iterator[Step]:
    if isinstance(live, Mapping | list | tuple):
        for one in live.values() if isinstance(live, Mapping) else live:
            yield from _steps_in(one)
    elif _sections_of(live) is not None:
        yield cast(Step, live)


def _sections_of(live: object) -> Callable[[], Mapping[str, object]] | None:
    found = getattr(live, "sections", None)
    return found if callable(found) and not isinstance(live, type) and hasattr(live, "check_finite") else None


def check_object_names(names: Iterable[str]) -> None:
    """UsageError for those that `capture` or `restore` could not take by name, before anything is saved.

    A typo in the name of a section would be an object of that name, noticed only when it is restored.
    """
    for name in names:
        if name in SECTIONS or name in RESTORE_ONLY:
            raise UsageError(
                f"an object is named {name!r}",
                limit="that is a parameter or a section of its own: " + ", ".join((*SECTIONS, *RESTORE_ONLY)),
                remedy="give it another name",
            )
        close = difflib.get_close_matches(name, [one for one in SECTIONS if one != "generators"], 1, cutoff=0.8)
        if not close:
            continue
        remedy = f"did you mean {close[0]}? Several models or optimizers are given as a list or dict"
        raise UsageError(f"there is no section {name!r}", limit=f"there are {', '.join(SECTIONS[:6])}", remedy=remedy)


def _each(live: object, path: str) -> object:
    """The states of one object, or of a list or dict of them."""
    if isinstance(live, list | tuple):
        return [_each(one, f"{path}[{index}]") for index, one in enumerate(live)]
    if isinstance(live, Mapping):
        return {key: _each(one, f"{path}[{key!r}]") for key, one in live.items()}
    return _state_of(live, path)


def _state_of(live: object, path: str) -> object:
    state_dict = getattr(live, "state_dict", None)
    if not callable(state_dict):
        raise wrong(path, live, "it has state_dict() and load_state_dict()", "store plain values in extra=")
    if isinstance(live, torch.nn.Module):
        plain = plain_names(live)
        with parts_kept():
            return _in_parts({plain(name): value for name, value in live.state_dict().items()})
    if isinstance(live, torch.optim.Optimizer):
        with parts_kept():
            return _in_parts(plain_state(live))
    return _in_parts(state_dict())


def _in_parts(state: object) -> object:
    """The state with this rank's part in place of each tensor that is spread over ranks."""

    def is_part(value: object) -> bool:
        return isinstance(value, CutTensor) or is_distributed(value)

    return map_leaves(lambda value: part_of(value) or value.to_local(), state, is_part)
