"""A loss function with variables of its own: what it keeps from call to call, as the hidden state of a text.

A copy of a function is the function itself, and so a step of copies would write its hidden state, on fake tensors even,
where the user's next step reads it. Here each copy has its own: variables of enclosing functions, globals that the
function assigns, and entries of dicts, lists and plain objects that either names. They are put in place for a call.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any  # Any: keys of any type

from flatout.data.nested import tensors_in
from flatout.train.loss import LossFn

MOST_ENTRIES = 1000
"""More are a vocabulary or a data set, which takes long to copy for each call."""
_MISSING = object()
"""Of a variable that is not assigned, and of an entry that is not there."""
State = list[tuple[object, object]]
"""Of each variable its value, and what that has inside."""


def with_own_variables(loss_fn: LossFn) -> LossFn:
    """The loss function, which from now on keeps what it changes to itself; as it is where it names nothing to change.

    Other callables are copied as objects, with what they hold.
    """
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    if not isinstance(function, FunctionType):
        return loss_fn
    variables = _Variables(function)
    return _OwnVariables(loss_fn, variables) if variables else loss_fn


class _OwnVariables:
    """It begins with the variables as they are at the first call."""

    def __init__(self, loss_fn: LossFn, variables: _Variables, state: State | None = None) -> None:
        functools.update_wrapper(self, loss_fn)  # its metrics and count_terms too
        self._loss_fn, self._variables, self._state = loss_fn, variables, state

    def __call__(self, model: Any, batch: Any) -> Any:  # as any loss function
        theirs = self._variables.state()
        if self._state is not None:
            self._variables.put(self._state)
        try:
            return self._loss_fn(model, batch)
        finally:
            self._state = self._variables.state()
            self._variables.put(theirs)

    def __deepcopy__(self, memo: object) -> _OwnVariables:
        return _OwnVariables(self._loss_fn, self._variables, self._state)


class _Variables:
    """What a function names that outlives its calls."""

    def __init__(self, function: FunctionType) -> None:
        code, names = function.__code__, function.__globals__
        assigned = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
        self._cells = [one for one in function.__closure__ or () if not _is_fixed(_in_cell(one))]
        self._globals = names
        held = [one for one in code.co_names if not _is_fixed(value := names.get(one)) and _entries(value) is not None]
        self._names = list(dict.fromkeys((*held, *assigned)))

    def __bool__(self) -> bool:
        return bool(self._cells or self._names)

    def state(self) -> State:
        values = [_in_cell(one) for one in self._cells] + [self._globals.get(one, _MISSING) for one in self._names]
        return [(value, _copied(_entries(value))) for value in values]

    def put(self, state: State) -> None:
        values = [value for value, _ in state]
        for cell, value in zip(self._cells, values, strict=False):
            if value is not _MISSING:
                cell.cell_contents = value
            elif _in_cell(cell) is not _MISSING:
                del cell.cell_contents
        for name, value in zip(self._names, values[len(self._cells) :], strict=True):
            _set(self._globals, name, value)
        for value, inside in state:
            now = _entries(value)
            if isinstance(now, list) and isinstance(inside, list):
                now[:] = inside
            elif isinstance(now, dict) and isinstance(inside, dict):
                only_tensors = now is not value
                for name in [*now, *(one for one in inside if one not in now)]:
                    before, after = now.get(name, _MISSING), inside.get(name, _MISSING)
                    if before is not after and not (only_tensors and _without_tensors(before, after)):
                        _set(now, name, after)


Entries = dict[Any, object] | list[object]  # Any: whatever the keys are


def _set(names: dict[Any, object], name: object, value: object) -> None:
    if value is not _MISSING:
        names[name] = value
    else:
        names.pop(name, None)


def _in_cell(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _is_fixed(value: object) -> bool:
    """Does it never change in a call, or is it copied or put back by others, as modules are, or too long to copy?"""
    import torch

    if isinstance(value, dict | list):
        return len(value) > MOST_ENTRIES
    return isinstance(value, torch.nn.Module | ModuleType | type | Callable)


def _entries(value: object) -> Entries | None:
    """What a dict, a list or a plain object holds, live. Of objects, such as a log, only tensors are changed."""
    if isinstance(value, dict | list):
        return value
    import torch

    if _is_fixed(value) or isinstance(value, torch.Tensor):
        return None
    return getattr(value, "__dict__", None)


def _copied(entries: Entries | None) -> object:
    return None if entries is None else entries.copy()


def _without_tensors(*values: object) -> bool:
    found: Iterator[object] = (one for value in values for one in tensors_in(value))
    return next(found, None) is None
