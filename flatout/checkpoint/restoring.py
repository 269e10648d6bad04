"""From a state back to live objects: everything is compared first, then loaded; a failure half-way is undone."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.parameter import is_lazy

from flatout.arguments import as_path, wrong
from flatout.checkpoint import manifest
from flatout.checkpoint.capturing import Live, Stateful, Step, live_sections
from flatout.checkpoint.differences import Differences, Findings
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.model_names import plain_names, without_wrappers
from flatout.checkpoint.optimizers import check_optimizer, load_optimizer
from flatout.checkpoint.parts import Part, spread_like
from flatout.checkpoint.rank_generators import states_here
from flatout.checkpoint.saved import Checkpoint, Loaded, open_checkpoint
from flatout.errors import UsageError
from flatout.generators import check_generators, generator_states, set_generators
from flatout.parallel.whole_tensors import CutTensor, parts_kept
from flatout.torch_private.attributes import LAYOUT_VERSIONS


@dataclass(frozen=True, kw_only=True)
class _Loading:
    """One object's state, compared and ready to be loaded."""

    path: str
    load: Callable[[], object]
    before: Callable[[], Callable[[], object]]
    """Remembers how the object is now, and returns a function that restores that."""


def restore(
    source: Mapping[str, object] | Checkpoint | Loaded | str | os.PathLike[str],
    step: Step | None = None,
    data: Live | None = None,
    *,
    model: Live | None = None,
    optimizer: Live | None = None,
    scheduler: Live | None = None,
    scaler: Live | None = None,
    generators: bool = True,
    strict: bool = True,
    **objects: Live | None,
) -> Differences:
    """Put the objects given, and all random number generators, back to what `source` holds; returns what differed.

    restore(checkpoints.load(), step, train, ema=averaged)    # what capture(step, train, ema=averaged) took

    `source` may be a folder: its newest whole checkpoint is taken. Objects are matched as `capture` took them, lists
    and dicts included; with a `step` the run must have all that the checkpoint has. Tensors go to the device of their
    parameter; an optimizer keeps its own way of computing (fused, foreach, capturable). Objects are loaded from copies,
    so the state can be restored again. `generators=False` leaves the random numbers alone, as for an evaluation.
    Each rank of torch.distributed continues from its own random states. Where there were fewer ranks, the additional
    ones are seeded from rank 0's states and their number; rank 0 warns, once, of another number of ranks.
    Raises UsageError listing what is missing, unexpected, or of another shape or dtype, before anything is
    changed. With strict=False what fits is loaded, converted to the dtype here, and the rest is left as it is.
    """
    state, found = _state_in(source), Findings()
    given = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    live_by_section = live_sections(step, data, given, objects)
    if step is not None:  # a training that continues needs all that it had
        found.unexpected += [
            name for name in ("scheduler", "scaler", "data", "objects") if name in state.keys() - live_by_section
        ]
    loadings = []
    for section, whole in live_by_section.items():
        pairs = list(_pairs(section, whole, state, found))
        loadings += [_compare(path, live, saved, found, strict) for path, live, saved in pairs]
        if section == "model" and strict:
            _refuse(found)  # another model explains an optimizer that does not fit either
    # a model's load is checked to the last shape, so it goes last: what might still fail goes before it
    loadings.reverse()
    if strict:
        _refuse(found)
    differences, note = found.differences(), None
    if generators and "generators" in state:
        note = _generators(state["generators"], live_by_section.get("model"), loadings)
    _load_all(loadings)
    if note is not None:
        warnings.warn(note, stacklevel=2)
    return differences


def _state_in(source: object) -> Mapping[str, object]:
    """The state itself; of a folder, that of the newest whole checkpoint in it, or of the one that it is. UsageError
    for anything that has none, and for an empty folder."""
    if isinstance(source, str | os.PathLike):
        folder = as_path(source, "source")
        checkpoints = Checkpoints(folder)
        source = open_checkpoint(folder) if (folder / manifest.NAME).exists() else checkpoints.load()
        if source is None:
            raise UsageError(f"there is no checkpoint in {folder}", remedy="name the folder that Checkpoints was given")
    if isinstance(source, Checkpoint):
        return source.load()
    if isinstance(source, Loaded):
        return source.state
    if not isinstance(source, Mapping):
        limit = "it is what Checkpoints.load(), latest(), best() or at() gave, or capture(...)"
        remedy = "None means that nothing was saved: train from the start" if source is None else ""
        raise wrong("source", source, limit, remedy)
    return source


def _refuse(found: Findings) -> None:
    """Raise for what does not fit, if anything does not."""
    differences = found.differences()
    if differences:
        raise UsageError(
            f"the checkpoint does not fit: {differences.text()}",
            limit="strict=True needs the same names, shapes and dtypes",
            remedy="build the objects as they were when it was saved, or pass strict=False to load what fits",
        )


def _load_all(loadings: list[_Loading]) -> None:
    with contextlib.ExitStack() as on_failure:
        for loading in loadings:
            on_failure.callback(loading.before())
            try:
                loading.load()
            except Exception as error:  # of the user's own load_state_dict: add where, and raise it again
                error.add_note(f"while restoring {loading.path}; what was restored before it has been undone")
                raise
        on_failure.pop_all()


def _pairs(
    section: str, live: object, state: Mapping[str, object], found: Findings
) -> Iterator[tuple[str, object, object]]:
    """(path, object, its saved state) for each object of a section; those without a counterpart are noted."""
    if section in state:
        yield from _matched(section, live, state[section], found)
    else:
        found.missing.append(f"{section} (the checkpoint holds {', '.join(state)})")


def _matched(path: str, live: object, saved: object, found: Findings) -> Iterator[tuple[str, object, object]]:
    if not isinstance(live, list | tuple | Mapping):
        yield path, live, saved
        return
    if not isinstance(saved, list | tuple | Mapping):
        what = f"{path} is saved as a {type(saved).__name__}, not as several objects"
        raise UsageError(what, remedy="pass what was saved")
    here, there = _by_key(live), _by_key(saved)
    found.missing += [f"{path}[{key!r}]" for key in here if key not in there]
    found.unexpected += [f"{path}[{key!r}]" for key in there if key not in here]
    for key in here:
        if key in there:
            yield from _matched(f"{path}[{key!r}]", here[key], there[key], found)


def _by_key(several: Sequence[object] | Mapping[object, object]) -> dict[object, object]:
    return dict(several) if isinstance(several, Mapping) else dict(enumerate(several))


def _compare(path: str, live: object, saved: object, found: Findings, strict: bool) -> _Loading:
    if not isinstance(live, Stateful) or not callable(live.load_state_dict):
        raise wrong(path, live, "it has state_dict() and load_state_dict()")
    if isinstance(live, torch.nn.Module):
        return _compare_model(path, live, saved, found)
    load, state_dict = live.load_state_dict, live.state_dict
    if isinstance(live, torch.optim.Optimizer):
        optimizer, whole = live, check_optimizer(path, live, saved, found)

        def before() -> Callable[[], object]:  # loading replaces its tensors: the old ones are intact
            with parts_kept():
                return partial(load, state_dict())

        return _Loading(path=path, load=lambda: load_optimizer(optimizer, whole, exact_dtypes=strict), before=before)
    if isinstance(live, torch.optim.lr_scheduler.LRScheduler):
        _compare_scheduler(path, live, saved, found)
    return _Loading(
        path=path,
        load=lambda: load(copy.deepcopy(saved)),
        before=lambda: partial(load, copy.deepcopy(state_dict())),
    )


def _compare_scheduler(path: str, live: Stateful, saved: object, found: Findings) -> None:
    """torch loads the state of any scheduler into any other. Names that begin with "_" differ between its versions."""
    here = live.state_dict()
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        own, there = ({name for name in state if not str(name).startswith("_")} for state in (here, saved))
        kind = type(live).__name__
        found.missing += [f"{path}: {name} of {kind}" for name in sorted(own - there)]
        found.unexpected += [f"{path}: {name}, which {kind} has not" for name in sorted(there - own)]


def _generators(saved: object, model: object, loadings: list[_Loading]) -> str | None:
    """Adds this rank's states to what is loaded; returns a warning about them, if any."""
    if not isinstance(saved, Mapping):
        what = f"the states of the random number generators are a {type(saved).__name__}"
        raise UsageError(what, remedy="pass generators=False to leave the generators as they are")
    check_generators(saved)
    states, note = states_here(saved, model)
    check_generators(states)

    def before() -> Callable[[], None]:
        now = generator_states()
        return lambda: set_generators(now)

    loadings.append(_Loading(path="generators", load=lambda: set_generators(states), before=before))
    return note


def _compare_model(path: str, model: torch.nn.Module, saved: object, found: Findings) -> _Loading:
    if not isinstance(saved, Mapping):
        raise UsageError(f"{path} is saved as a {type(saved).__name__}, not as one model", remedy="pass what was saved")
    with parts_kept():
        plain, own = plain_names(model), model.state_dict()
    here = {plain(name): name for name in own}
    there = without_wrappers(saved, here.keys())
    found.missing += [f"{path}: {name}" for name in here if name not in there]
    found.unexpected += [f"{path}: {name}" for name in there if name not in here]
    fitting: OrderedDict[str, object] = OrderedDict()
    for name, value in there.items():
        if name in here and _fits(f"{path}: {name}", own[here[name]], value, found):
            fitting[here[name]] = spread_like(own[here[name]], value)
    # the layout version of each layer; torch looks for it as an attribute of the dict
    setattr(fitting, LAYOUT_VERSIONS, getattr(own, LAYOUT_VERSIONS, None))
    return _Loading(
        path=path,
        load=lambda: _load_model(model, fitting),
        before=lambda: lambda: None,  # nothing of it can fail, and a copy would double its memory
    )


def _load_model(model: torch.nn.Module, fitting: Mapping[str, object]) -> None:
    try:
        inspect.signature(model.load_state_dict).bind(fitting, strict=False)
    except TypeError:  # a method of the model's own, without `strict`; all names were compared already
        model.load_state_dict(fitting)
    else:
        model.load_state_dict(fitting, strict=False)


def _fits(name: str, here: object, there: object, found: Findings) -> bool:
    """True if the saved value can be loaded; notes how it differs."""
    if not isinstance(here, torch.Tensor | CutTensor) or (isinstance(here, torch.Tensor) and is_lazy(here)):
        return True
    if here.is_meta:
        remedy = "give it memory first: model.to_empty(device=...)"
        raise UsageError(f"{name} is on the meta device", limit="it has no memory to load into", remedy=remedy)
    if not isinstance(there, torch.Tensor | Part) or here.shape != there.shape:
        saved = list(there.shape) if isinstance(there, torch.Tensor | Part) else f"a {type(there).__name__}"
        found.shapes.append(f"{name} ({saved} saved, {list(here.shape)} here)")
        return False
    if here.dtype != there.dtype:
        saved_dtype, own_dtype = (str(one.dtype).removeprefix("torch.") for one in (there, here))
        found.dtypes.append(f"{name} ({saved_dtype} saved, {own_dtype} here)")
    return True
