"""Follow every operator of one step: what it computes, and which module and line of the script it belongs to.

    with OperatorFollower(prefer=folder) as follower:
        ...                                     # one step, which takes several times as long
    follower.operators

The profiler measures times but sees neither results nor lines; this sees both but slows the step down. So each looks
at steps of its own, and `attribution` brings them together. Importing this imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flatout.flops import OperationCount
from flatout.operator_bytes import moved_bytes, tensors_among
from flatout.profiling.profile import Phase
from flatout.torch_private.attributes import name_in_schema
from flatout.torch_private.dispatch import (
    ListeningMode,
    current_graph_task,
    current_node,
    next_node_number,
    node_number,
    without_torch_function,
)
from flatout.tracebacks import is_users_file

if TYPE_CHECKING:
    from torch._ops import OpOverload

    Call = tuple[OpOverload[..., object], Sequence[object], Mapping[str, object], object]
    """(operation, args, kwargs, what it returned)"""

MOST_OPERATORS = 200_000
"""That are kept; of more only the number is known."""
_LOADING = os.sep + os.path.join("torch", "utils", "data") + os.sep
_FETCHES = ("__next__", "_next_data")
_UPDATING = os.sep + os.path.join("torch", "optim") + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where an operator was called."""

    module: str = ""
    line: str = ""
    """'/path/train.py:41'."""
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedOperator:
    """One call."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Of its tensor arguments, without those in lists and without scalars, as the profiler records them."""
    dtype: str
    flops: float | None
    size_bytes: float
    phase: Phase
    origin: Origin


@dataclass(kw_only=True)
class FollowedModule:
    """One module that was called."""

    path: str
    kind: str
    depth: int
    calls: int = 0


class OperatorFollower:
    """Follows while its context is open; `fault` says why it gave up, which the script must not notice.

    Its context is opened in the thread that takes the step: what other threads compute meanwhile belongs to no step.
    """

    def __init__(self, *, prefer: str | None = None) -> None:
        """prefer: the folder whose lines are named, where one of them led to an operator."""
        self.operators: list[FollowedOperator] = []
        self.count = 0
        self.modules: dict[str, FollowedModule] = {}
        self.devices: set[torch.device] = set()
        """That operators ran on."""
        self.fault = ""
        self.uncounted = ""
        """Why FLOPs of some operators are missing."""
        self._prefer = prefer.rstrip(os.sep) + os.sep if prefer else ""
        self._flops = OperationCount()
        self._stack = contextlib.ExitStack()
        self._open_modules: list[str] = []
        self._thread = threading.get_ident()
        self._names: dict[int, str] = {}
        self._roots: dict[int, str] = {}
        self._named: list[nn.Module] = []
        """Held while following: the number of one that is gone would be given to another."""
        self._origins: list[tuple[int, Origin]] = []
        """(sequence number of the newest autograd node, where it was made), in forward order."""
        self._newest = -1

    def __enter__(self) -> OperatorFollower:
        for handle in (
            torch.nn.modules.module.register_module_forward_pre_hook(self._module_starts),
            torch.nn.modules.module.register_module_forward_hook(self._module_ends, always_call=True),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._named.clear()

    @property
    def incomplete(self) -> str:
        """Why the operators, or their FLOPs, are not all of the step's; '' where they are."""
        if self.fault:
            return f"following a step failed: {self.fault}"
        if self.count > len(self.operators):
            return f"a step has more than {MOST_OPERATORS:,} operators"
        return self.uncounted

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Operators called meanwhile, and their backward operators, belong to a module of this name."""
        if self._is_elsewhere():
            yield
            return
        outer = f"{self._open_modules[-1]}." if self._open_modules else ""
        self._open_modules.append(f"{outer}{name}")
        try:
            yield
        finally:
            self._open_modules.pop()

    # called by the dispatch mode

    def begins(self) -> tuple[Phase, Origin]:
        backward = current_graph_task() != -1
        if backward and not self._open_modules:
            return "backward", self._forward_origin(current_node())
        recording = torch.is_grad_enabled()
        origin, work = self._origin(sys._getframe(2), recording)
        if work is not None and not backward:
            return work, origin
        if recording and (number := next_node_number()) != self._newest:
            self._newest = number
            if not self._origins or (number > self._origins[-1][0] and self._origins[-1][1] != origin):
                self._origins.append((number - 1, origin))
        if backward:  # activation checkpointing computes a forward again
            return "backward", origin
        if not self._open_modules:
            return "other", origin
        return ("forward" if recording else "evaluation"), origin

    def ended(self, call: Call, where: tuple[Phase, Origin]) -> None:
        self.count += 1
        if len(self.operators) >= MOST_OPERATORS:
            return
        operation, args, kwargs, out = call
        name = name_in_schema(operation)
        phase, origin = where
        devices = {one.device for one in (*tensors_among(tuple(args)), *tensors_among(out)) if one.dim()}
        self.devices |= devices
        if len({one.type for one in devices}) > 1 and phase in ("forward", "evaluation", "other"):
            phase = "copies"
        self.operators.append(
            FollowedOperator(
                name=name,
                shapes=shapes_of(args, kwargs),
                dtype=_dtype(args, out),
                flops=self._counted(name, call),
                size_bytes=moved_bytes(*call),
                phase=phase,
                origin=origin,
            )
        )

    def _counted(self, name: str, call: Call) -> float | None:
        """FLOPs; where they are unknown, the others are still counted, and `uncounted` says so."""
        try:
            found = self._flops.of(*call)
        except Exception as error:  # of an extension's formula, or of torch's with a kind of tensor that is new to it
            self.uncounted = self.uncounted or f"FLOPs of {name} cannot be counted: {type(error).__name__}: {error}"
            return None
        if found is None and name.startswith("higher_order::"):
            self.uncounted = self.uncounted or f"{name} does not show the operators that it calls"
        return found

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            with without_torch_function():  # the script's own modes must not see our operations
                yield
        except Exception as error:
            self.fault = self.fault or f"{type(error).__name__}: {error}"

    # where operators come from

    def _forward_origin(self, node: object) -> Origin:
        """Of the forward operator that this backward node belongs to."""
        if node is None or not self._origins:
            return _NOWHERE
        at = bisect_right(self._origins, node_number(node), key=lambda entry: entry[0]) - 1
        return self._origins[at][1] if at >= 0 else _NOWHERE

    def _origin(self, frame: FrameType | None, recording: bool) -> tuple[Origin, Phase | None]:
        """The innermost line of the user's code, and whether a loader or an optimizer is at work.

        No hook says so: the optimizer's cannot be registered from one of them, which is where a step ends.
        """
        first: FrameType | None = None
        found: FrameType | None = None
        work: Phase | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            if _is_users(file):
                if found is None and (not self._prefer or file.startswith(self._prefer)):
                    found = frame
                first = first or frame
            elif work is None and _LOADING in file and frame.f_code.co_name in _FETCHES:
                work = "data"
            elif work is None and _UPDATING in file and (first is None or not recording):
                work = "optimizer"  # beyond a line of the user's that records: the closure of a step
            frame = frame.f_back
        module = self._open_modules[-1] if self._open_modules else ""
        found = found or first
        if found is None:
            return Origin(module=module), work
        code = found.f_code
        return Origin(module=module, line=f"{code.co_filename}:{found.f_lineno}", function=code.co_name), work

    def _module_starts(self, module: nn.Module, arguments: object) -> None:
        if self._is_elsewhere():
            return
        again = current_graph_task() != -1 and id(module) in self._names  # by activation checkpointing
        if not self._open_modules and not again:
            root = self._root_name(module)
            self._names |= {id(one): f"{root}.{name}" if name else root for name, one in module.named_modules()}
            self._named += module.modules()
        path = self._names.get(id(module))
        if path is None:  # made or found while the outer one runs
            path = f"{self._open_modules[-1]}.{type(module).__name__}" if self._open_modules else type(module).__name__
        made = FollowedModule(path=path, kind=type(module).__name__, depth=len(self._open_modules))
        self.modules.setdefault(path, made).calls += 1
        self._open_modules.append(path)

    def _root_name(self, module: nn.Module) -> str:
        """Its class; with a number where another outermost module has the same class."""
        if id(module) not in self._roots:
            kind, taken = type(module).__name__, set(self._roots.values())
            number = next(n for n in range(1, len(taken) + 2) if (kind if n == 1 else f"{kind}#{n}") not in taken)
            self._roots[id(module)] = kind if number == 1 else f"{kind}#{number}"
        return self._roots[id(module)]

    def _module_ends(self, module: nn.Module, arguments: object, output: object) -> None:
        if self._open_modules and not self._is_elsewhere():
            self._open_modules.pop()

    def _is_elsewhere(self) -> bool:
        """Is this another thread, and none of autograd's? Hooks are called in all."""
        return threading.get_ident() != self._thread and current_graph_task() == -1


class _Mode(ListeningMode):
    def __init__(self, follower: OperatorFollower) -> None:
        super().__init__()
        self._follower = follower

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        follower = self._follower
        if follower.fault:
            return func(*args, **kwargs)
        where: tuple[Phase, Origin] | None = None
        with follower.guard():
            where = follower.begins()
        out = func(*args, **kwargs)
        if where is not None:
            with follower.guard():
                follower.ended((func, args, kwargs, out), where)
        return out


_NOWHERE = Origin()
_is_users = functools.lru_cache(maxsize=8192)(is_users_file)


def shapes_of(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    """The shapes that the profiler records: of tensors, not of lists of them; scalars have none."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    return tuple(tuple(one.shape) for one in tensors if one.dim())


def _dtype(args: Sequence[object], out: object) -> str:
    """Of the first argument in floating point, else of the first tensor; '' without one."""
    tensors = [*tensors_among(tuple(args)), *tensors_among(out)]
    found = next((one for one in tensors if one.is_floating_point()), tensors[0] if tensors else None)
    return "" if found is None else str(found.dtype).removeprefix("torch.")
