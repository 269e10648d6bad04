"""The live objects that levers act on: models, optimizers, loaders, and wrappers around outermost module calls.

They appear while an unmodified script runs (the discriminator is called before the generator), so a lever does not
loop over a list: it registers a function that is called for each object, present or future. What that function returns
undoes it, and is called when the lever is turned off.

    with lever.apply(subject, True):     # acts on present and future objects
        ...                              # steps run
                                         # all undone

Levers act on the calls of a model that train, and on no others: a trial proves them on training steps alone.
Evaluation, what the script does after training, and what takes a model apart (tracing, torch.func) run exactly as
written. What activation checkpointing recomputes runs as it did in forward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from flatout.torch_private.compiler import fx_trace_is_under_way
from flatout.torch_private.late import dispatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

T = TypeVar("T")
Undo = Callable[[T], None]
Visit = Callable[[T], "Undo[T] | None"]
Wrapper = Callable[["Module", Callable[[], object]], object]
Roots: TypeAlias = "Tensor | Sequence[Tensor]"
"""What a backward pass starts from."""
BackwardWrapper = Callable[["Roots", Callable[["Roots"], object]], object]


class Handles(Generic[T]):
    """Objects of one kind in the order of appearance. Held weakly: a script that makes a model per fold may drop it."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}
        self._visitors: list[tuple[Visit[T], list[tuple[weakref.ref[T], Undo[T]]]]] = []

    def __iter__(self) -> Iterator[T]:
        return iter([item for reference in list(self._references.values()) if (item := reference()) is not None])

    def __len__(self) -> int:
        return len(self._references)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._references

    def add(self, item: T) -> None:
        key = id(item)
        if key in self._references:
            return
        self._references[key] = weakref.ref(item, lambda _: self._references.pop(key, None))
        for visit, undos in self._visitors:
            self._visit(item, visit, undos)

    @contextlib.contextmanager
    def each(self, visit: Visit[T]) -> Iterator[None]:
        """Call `visit` for every object, present and future, until the context ends; then undo in reverse order.

        `visit` returns its undo, a function of the object, or None where it changed nothing. The undo must not hold
        a reference to the object itself.
        """
        undos: list[tuple[weakref.ref[T], Undo[T]]] = []
        entry = (visit, undos)
        try:
            self._visit_all(visit, undos)
            self._visitors.append(entry)
            yield
        finally:
            if entry in self._visitors:
                self._visitors.remove(entry)
            for reference, undo in reversed(undos):
                alive = reference()
                if alive is not None:
                    undo(alive)

    def _visit_all(self, visit: Visit[T], undos: list[tuple[weakref.ref[T], Undo[T]]]) -> None:
        """A separate function, so that no loop variable keeps the last object alive while the context lasts."""
        for item in self:
            self._visit(item, visit, undos)

    @staticmethod
    def _visit(item: T, visit: Visit[T], undos: list[tuple[weakref.ref[T], Undo[T]]]) -> None:
        undo = visit(item)
        if undo is not None:
            undos.append((weakref.ref(item), undo))


class Subject:
    """What is being trained. Built by `TrainStep` from its arguments, and by the script runner from what it observes.

    training_only: levers leave evaluation alone. That is for unmodified scripts, whose evaluation no trial runs; with
    `TrainStep` the user has chosen the plan. any_model: levers also act on models that are not in `modules`.
    """

    def __init__(self, *, training_only: bool = False, any_model: bool = True) -> None:
        self.training_only, self.any_model = training_only, any_model
        self._modes: tuple[Handles[Module], Handles[Module]] = Handles(), Handles()
        """The modules that train in evaluation mode, as a frozen backbone or a whole script may, and the others."""
        self._checkpointed: Handles[Module] = Handles()
        """Those of which a whole outermost call was checkpointed, `checkpoint(model, x)`. When recomputed, their calls
        are outermost again; those of other modules were inside one."""
        self.modules: Handles[Module] = Handles()
        self.optimizers: Handles[Optimizer] = Handles()
        self.made_at: dict[int, str] = {}
        """By an optimizer's identity: the script's line that made it, as far as that was noted."""
        self.loaders: Handles[DataLoader[object]] = Handles()
        self.wrappers: list[Wrapper] = []
        self.backward_wrappers: list[BackwardWrapper] = []
        self.incidents: list[tuple[str, str]] = []
        """(lever, what it reverted by itself while it was on and why), for the summary."""
        self.iterator_hooks: list[Callable[[DataLoader[object]], None]] = []
        self.before_update: list[Callable[[list[Tensor], Tensor, int], None]] = []
        """Called when a backward pass is about to update a parameter by itself, with all parameters of its optimizer,
        the parameter, and how many other optimizers step before that optimizer."""
        self.updating = False
        """Is such an update running? Its optimizer step is not one of the script's."""
        self.last_device: str | None = None
        """Where its weights were when they were last looked at; models may be gone before a run's end."""
        self.samples_drawn: int | None = None
        """By the loaders that feed training; None where they are not counted."""

    def note_incident(self, lever: str, why: str) -> None:
        """Record what a lever reverted by itself; once, however often it happens."""
        if (lever, why) not in self.incidents:
            self.incidents.append((lever, why))

    def reporter(self, lever: str) -> Callable[[str], None]:
        """`note_incident` of that lever."""
        return functools.partial(self.note_incident, lever)

    @property
    def in_use(self) -> bool:
        """Has any lever registered a callback?"""
        return bool(self.wrappers or self.backward_wrappers or self.iterator_hooks)

    def note_training(self, module: Module) -> None:
        """Record that `module` trains in the mode it is in now (`module.training`)."""
        if not any(module in known for known in self._modes):
            self._modes[bool(module.training)].add(module)

    def acts_on(self, module: Module) -> bool:
        """Do levers act on the call of `module` that is about to run?"""
        return (is_plain_training() or is_recomputation()) and self._is_as_in_training(module)

    def call(self, module: Module, function: Callable[[], object]) -> object:
        """Run an outermost module call, inside the levers' wrappers where levers act on it."""
        if is_plain_training():
            if is_checkpointing("_checkpoint_hook"):
                self._checkpointed.add(module)
        elif module not in self._checkpointed or not is_recomputation():
            return function()
        return self.wrapped(module, function) if self._is_as_in_training(module) else function()

    def wrapped(self, module: Module, function: Callable[[], object]) -> object:
        """Run a module call inside the levers' wrappers."""
        for wrapper in self.wrappers:
            function = functools.partial(wrapper, module, function)
        return function()

    def _is_as_in_training(self, module: Module) -> bool:
        """Is it in the mode it trains in? True for unknown modules."""
        return not self.training_only or module not in self._modes[not module.training]

    def around_calls(self, wrapper: Wrapper) -> AbstractContextManager[None]:
        """Put `wrapper(module, call)` around every outermost module call."""
        return _listed(self.wrappers, wrapper)

    def around_backward(self, wrapper: BackwardWrapper) -> AbstractContextManager[None]:
        """Put `wrapper(roots, run)` around every backward pass; `run(roots)` performs it."""
        return _listed(self.backward_wrappers, wrapper)

    def before_iterators(self, hook: Callable[[DataLoader[object]], None]) -> AbstractContextManager[None]:
        """Call `hook(loader)` each time before a DataLoader makes an iterator."""
        return _listed(self.iterator_hooks, hook)

    def before_steps(self, hook: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `hook()` before each step of each optimizer."""

        def watch(optimizer: Optimizer) -> Undo[Optimizer]:
            handle = optimizer.register_step_pre_hook(lambda *_: hook())
            return lambda optimizer: handle.remove()

        return self.optimizers.each(watch)


@contextlib.contextmanager
def _listed(items: list[T], item: T) -> Iterator[None]:
    """`item` is one of `items` until the context ends."""
    items.append(item)
    try:
        yield
    finally:
        items.remove(item)


def is_plain_training() -> bool:
    """Is this an ordinary forward that will be differentiated: not inside a backward pass, under torch.func or while
    being traced?"""
    return bool(dispatch().current_graph_task() == -1) and _is_differentiated()


def is_recomputation() -> bool:
    """Is a backward pass recomputing part of an ordinary forward?

    `torch.utils.checkpoint` with use_reentrant=False does. Reentrant checkpoints, and functions with a backward of
    their own, ran their forward without gradients, as plain calls, and recompute it in the same way.
    """
    return dispatch().current_graph_task() != -1 and is_checkpointing("_recomputation_hook") and _is_differentiated()


def _is_differentiated() -> bool:
    import torch

    private = dispatch()
    return (
        torch.is_grad_enabled()
        and private.transform_level() is None
        and private.jit_trace_under_way() is None
        and not fx_trace_is_under_way()
    )


def is_checkpointing(hook: str = "") -> bool:
    """Do tensors saved for backward now go to `torch.utils.checkpoint`? hook: only through the hook of this name."""
    hooks = dispatch().saved_tensor_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return False
    return bool(hooks[0].__qualname__.startswith(hook))
