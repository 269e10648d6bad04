"""What public functions are given, checked in one place and in one way.

Each check takes an argument and its name, and returns the value to work with; otherwise it raises a UsageError that
says what was given, what it has to be, and how to write it. Only what holds for every caller is checked here.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from flatout.errors import PlanError, UsageError
from flatout.parameters import parameters_of
from flatout.plan import Plan
from flatout.plan_choices import EXACTNESS_ORDER, Exactness, Scope
from flatout.plan_document import short
from flatout.units import parse_bytes

if TYPE_CHECKING:
    from torch import device
    from torch.nn import Module
    from torch.optim import Optimizer

T = TypeVar("T")

MOST_BYTES = 1 << 63
_SHOWN = (str, bytes, int, float, type(None), PurePath)


def described(value: object) -> str:
    """A wrong value in a few words: itself where it is short, else its type."""
    if isinstance(value, _SHOWN):
        return short(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def wrong(name: str, value: object, limit: str, remedy: str = "") -> UsageError:
    return UsageError(f"{name} is {described(value)}", limit=limit, remedy=remedy)


def as_instance(value: object, name: str, kind: type[T], *, limit: str, remedy: str = "") -> T:
    """One of the library's own objects."""
    if not isinstance(value, kind):
        raise wrong(name, value, limit, remedy)
    return value


def as_model(value: object, name: str = "model") -> Module:
    """A module whose parameters have their shapes."""
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(value, torch.nn.Module):
        remedy = "build the model and load its weights into it"
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            remedy = f"make one: {value.__name__}(...)"
        elif hasattr(value, "param_groups"):
            remedy = "the model comes first, then its optimizer"
        raise wrong(name, value, "it is a torch.nn.Module", remedy)
    lazy = next((path for path, one in value.named_parameters() if is_lazy(one)), None)
    if lazy is not None:
        raise UsageError(
            f"the {name}'s {lazy} has no shape yet",
            limit="lazy layers get theirs in the first forward pass",
            remedy="call the model once on an example, and make the optimizer after that",
        )
    return value


def as_optimizer(value: object, name: str = "optimizer") -> Optimizer:
    if not _works_as_optimizer(value):
        limit, remedy = "it is a torch.optim.Optimizer", "for example torch.optim.AdamW(model.parameters(), lr=1e-3)"
        raise wrong(name, value, limit, remedy)
    return value


def _works_as_optimizer(value: object) -> TypeGuard[Optimizer]:
    """Wrappers around an optimizer, which need not be subclasses, count too."""
    return not isinstance(value, type) and hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def check_optimizer_of(optimizer: Optimizer, model: Module) -> None:
    """Refuse an optimizer none of whose parameters is one of the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    moved = parameters_of(optimizer)
    if not any(id(parameter) in own for parameter in moved):
        raise UsageError(
            f"none of the optimizer's {len(moved)} parameters is one of the model's {len(own)}",
            limit="an optimizer moves the tensors that it was given",
            remedy="make the optimizer after the model, from model.parameters()",
        )


def as_loss_fn(value: T, name: str = "loss_fn") -> T:
    """`loss_fn(model, batch)`. A criterion of torch is refused: it would get the model in place of the scores."""
    return _of_model_and_batch(value, name, "returns the mean loss", "")


def as_metrics(value: T, name: str = "metrics") -> T:
    """`metrics(model, batch)`."""
    return _of_model_and_batch(value, name, "returns a dict of figures", ".metrics")


def _of_model_and_batch(value: T, name: str, returns: str, part: str) -> T:
    from flatout.torch_private.modules import Loss

    limit = f"it is called as {name}(model, batch) and {returns}"
    if isinstance(value, Loss):
        remedy = f"wrap it: flatout.supervised(torch.nn.{type(value).__name__}(...)){part}"
        raise wrong(name, value, limit, remedy)
    if getattr(value, "__module__", None) == "torch.nn.functional":
        function = getattr(value, "__name__", "")
        what = f"{name} is torch.nn.functional.{function}"
        raise UsageError(what, limit=limit, remedy=f"wrap it: flatout.supervised({function}){part}")
    remedy = f"for (inputs, targets): flatout.supervised(torch.nn.CrossEntropyLoss()){part}"
    return as_function(value, name, 2, limit=limit, remedy=remedy)


def as_function(value: T, name: str, arguments: int, *, limit: str, remedy: str = "") -> T:
    """Something that can be called with that many positional arguments."""
    import torch

    if not callable(value) or isinstance(value, type):
        raise wrong(name, value, limit, remedy)
    try:
        signature = inspect.signature(value.forward if isinstance(value, torch.nn.Module) else value)
    except (TypeError, ValueError):  # of a function written in C
        return value
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        called = getattr(value, "__name__", None) or described(value)
        raise UsageError(f"{name} is {called}{signature}", limit=limit, remedy=remedy) from error
    return value


def as_collate_fn(value: T) -> T:
    """`collate_fn(samples)`. A class may be one, such as tuple, but not where it is an instance that is called."""
    if isinstance(value, type) and not any("__call__" in vars(kind) for kind in value.__mro__):
        return value
    return as_function(value, "collate_fn", 1, limit="it is called with the list of a batch's samples")


def as_plan(value: object, scope: Scope | None = None) -> Plan:
    """The plan; an empty one for None. `scope`: where it is going to be applied, if it is.

    Raises PlanError for a choice that applies neither there nor in a scope that shares its plan.
    """
    if value is None:
        return Plan()
    if isinstance(value, Plan):
        if scope is not None:
            value.check_for(scope)
        return value
    remedy = "for example Plan(precision='bf16')"
    if isinstance(value, str | os.PathLike):
        remedy = f"read it with flatout.plan.read_plan({os.fspath(value)!r})"
    elif isinstance(value, Mapping):
        remedy = "write Plan(**choices)"
    error = wrong("plan", value, "it is a flatout.Plan or None", remedy)
    raise PlanError(error.what, limit=error.limit, remedy=error.remedy)


def as_whole_number(value: object, name: str, *, least: int = 1, remedy: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise wrong(name, value, f"it is a whole number of at least {least}", remedy)
    return int(value)


def as_exactness(value: object) -> Exactness:
    """How much the numbers may change."""
    for word in EXACTNESS_ORDER:
        if value == word:
            return word
    raise UsageError(f"exactness is {value!r}", limit=f"it is one of {', '.join(EXACTNESS_ORDER)}")


def as_seconds(value: object, name: str = "seconds") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}", limit="it is above 0, and finite", remedy="300 are five minutes")
    return value


def as_bytes(value: object, name: str) -> int:
    """A number of bytes, or a text such as '2 GiB'."""
    found = parse_bytes(value) if isinstance(value, str) else value
    count = None
    if isinstance(found, Integral) or (isinstance(found, float) and found.is_integer()):  # 2e9
        count = int(found)
    if count is None or isinstance(found, bool) or not 1 <= count < MOST_BYTES:
        raise UsageError(
            f"{name} is {described(value)}",
            limit="it is a whole number of bytes above 0, or a text such as '2 GiB'",
            remedy="round it: int(0.9 * total)" if isinstance(value, float) and math.isfinite(value) else "",
        )
    return count


def as_device(value: device | str | int, name: str = "device") -> device:
    """A torch.device that torch can use here."""
    import torch

    limit, remedy = "it is what torch.device takes", "for example 'cpu', 'cuda:0' or flatout.device()"
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise wrong(name, value, limit, remedy) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = (found.index or 0) < count
    if found.type != "cuda":
        try:
            there = torch.empty(0, device=found).device.type == found.type
        except Exception:  # each backend that is not there raises another kind
            there = False
    if not there:
        limit = f"torch sees {', '.join(['cpu', *(f'cuda:{index}' for index in range(count))])}"
        raise wrong(name, value, limit, "see which and why with: flatout check")
    return found


def as_path(value: object, name: str) -> Path:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else b""
    if isinstance(path, bytes) or not path or "\0" in path:
        raise wrong(name, value, "it is a path, as text or pathlib.Path", "for example 'runs/digits'")
    return Path(path)


def as_iterable(value: T, name: str, *, limit: str, remedy: str) -> T:
    """Something to iterate over. A string, a dict, a tensor or array, and a tuple of these are refused: each is one."""
    parts = value if isinstance(value, tuple) else (value,)
    one = isinstance(value, str | bytes | Mapping) or any(hasattr(part, "shape") for part in parts)
    dataset = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if isinstance(value, type) or one or not (hasattr(value, "__iter__") or dataset):
        raise wrong(name, value, limit, remedy)
    return value
