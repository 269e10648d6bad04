"""The live objects that levers act on: models, optimizers, loaders, and wrappers around outermost module calls.

They appear while an unmodified script runs (the discriminator is called before the generator), so a lever does not
loop over a list: it registers a function that is called for each object, present or future. What that function returns
undoes it, and is called when the lever is turned off.

    with lever.apply(subject, True):     # acts on present and future objects
        ...                              # steps run
                                         # all undone
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from flatout.levers.training_call import CheckpointedCalls, TrainingModes, is_plain_training, is_recomputation

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
        self._modes = TrainingModes()
        self._checkpointed = CheckpointedCalls()
        self.modules: Handles[Module] = Handles()
        self.optimizers: Handles[Optimizer] = Handles()
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

    @property
    def in_use(self) -> bool:
        """Has any lever registered a callback?"""
        return bool(self.wrappers or self.backward_wrappers or self.iterator_hooks)

    def note_training(self, module: Module) -> None:
        """Record that `module` trains in the mode it is in now (`module.training`)."""
        self._modes.note(module)

    def acts_on(self, module: Module) -> bool:
        """Do levers act on the call of `module` that is about to run?"""
        return (is_plain_training() or is_recomputation()) and self._is_as_in_training(module)

    def call(self, module: Module, function: Callable[[], object]) -> object:
        """Run an outermost module call, inside the levers' wrappers where levers act on it."""
        if is_plain_training():
            self._checkpointed.note(module)
        elif module not in self._checkpointed or not is_recomputation():
            return function()
        if not self._is_as_in_training(module):
            return function()
        for wrapper in self.wrappers:
            function = _bind(wrapper, module, function)
        return function()

    def _is_as_in_training(self, module: Module) -> bool:
        return not self.training_only or self._modes.is_as_in_training(module)

    @contextlib.contextmanager
    def around_calls(self, wrapper: Wrapper) -> Iterator[None]:
        """Put `wrapper(module, call)` around every outermost module call."""
        self.wrappers.append(wrapper)
        try:
            yield
        finally:
            self.wrappers.remove(wrapper)

    @contextlib.contextmanager
    def around_backward(self, wrapper: BackwardWrapper) -> Iterator[None]:
        """Put `wrapper(roots, run)` around every backward pass; `run(roots)` performs it."""
        self.backward_wrappers.append(wrapper)
        try:
            yield
        finally:
            self.backward_wrappers.remove(wrapper)

    @contextlib.contextmanager
    def before_iterators(self, hook: Callable[[DataLoader[object]], None]) -> Iterator[None]:
        """Call `hook(loader)` each time before a DataLoader makes an iterator."""
        self.iterator_hooks.append(hook)
        try:
            yield
        finally:
            self.iterator_hooks.remove(hook)


def _bind(wrapper: Wrapper, module: Module, inner: Callable[[], object]) -> Callable[[], object]:
    return lambda: wrapper(module, inner)
