"""The live handles that levers act on: models, optimizers, loaders and the seam around an outermost module call.

Handles appear while an unmodified script runs (the discriminator is called before the generator), so a lever does not
loop over a list: it registers a function, which is called for each handle that is there and for each that comes, and
whose returned undo is called when the lever is taken back.

    with lever.apply(subject, True):     # acts on what is there and on what comes
        ...                              # steps run
                                         # all undone
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from flatout.levers.training_call import CheckpointedCalls, TrainingModes, is_plain_training, is_recomputation

T = TypeVar("T")
Undo = Callable[[T], None]
Visit = Callable[[T], "Undo[T] | None"]
Wrapper = Callable[[Any, Callable[[], Any]], Any]
BackwardWrapper = Callable[[Any, Callable[[Any], Any]], Any]


class Handles(Generic[T]):
    """Objects of one kind in the order of appearance, held weakly: a script that makes a model a fold may drop it."""

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
        """`visit` every handle, present and future, until the context ends; then undo in reverse order.

        `visit` returns its undo, a function of the handle, or None where it changed nothing. The undo must not hold
        the handle itself.
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
        """A function of its own: its loop must not hold the last handle for as long as the context lasts."""
        for item in self:
            self._visit(item, visit, undos)

    @staticmethod
    def _visit(item: T, visit: Visit[T], undos: list[tuple[weakref.ref[T], Undo[T]]]) -> None:
        undo = visit(item)
        if undo is not None:
            undos.append((weakref.ref(item), undo))


class Subject:
    """What is being trained. Built by `TrainStep` from its arguments, and by the script runner from what it sees.

    training_only: levers leave evaluation as it is. So it is for an unmodified script, whose evaluation no trial runs;
    who gives a plan to `TrainStep` asks for it himself. any_model: levers act on models that are not in `modules`, too.
    """

    def __init__(self, *, training_only: bool = False, any_model: bool = True) -> None:
        self.training_only, self.any_model = training_only, any_model
        self._modes = TrainingModes()
        self._checkpointed = CheckpointedCalls()
        self.modules: Handles[Any] = Handles()
        self.optimizers: Handles[Any] = Handles()
        self.loaders: Handles[Any] = Handles()
        self.wrappers: list[Wrapper] = []
        self.backward_wrappers: list[BackwardWrapper] = []
        self.incidents: list[tuple[str, str]] = []
        """(lever, what it took back by itself while it was on and why), for the summary."""
        self.iterator_hooks: list[Callable[[Any], None]] = []
        self.before_update: list[Callable[[list[Any], Any, int], None]] = []
        """Called where a backward pass is about to update a parameter by itself: with all that its optimizer holds, the
        parameter, and how many other optimizers' steps will come before that optimizer's."""
        self.updating = False
        """Is such an update under way? Its optimizer's step is none of the script's."""
        self.samples_drawn: int | None = None
        """By the loaders that feed training; None: nobody counts."""

    def note_incident(self, lever: str, why: str) -> None:
        """What a lever took back by itself; said once, however often it happens."""
        if (lever, why) not in self.incidents:
            self.incidents.append((lever, why))

    @property
    def in_use(self) -> bool:
        """Does any lever need to be called back?"""
        return bool(self.wrappers or self.backward_wrappers or self.iterator_hooks)

    def note_training(self, module: Any) -> None:
        """`module` trains, in the mode that it is in now."""
        self._modes.note(module)

    def acts_on(self, module: Any) -> bool:
        """Do levers act on the call of `module` that is about to run?"""
        return (is_plain_training() or is_recomputation()) and self._is_as_in_training(module)

    def call(self, module: Any, function: Callable[[], Any]) -> Any:
        """Run an outermost module call through the wrappers that levers have put around it, if it is theirs."""
        if is_plain_training():
            self._checkpointed.note(module)
        elif module not in self._checkpointed or not is_recomputation():
            return function()
        if not self._is_as_in_training(module):
            return function()
        for wrapper in self.wrappers:
            function = _bind(wrapper, module, function)
        return function()

    def _is_as_in_training(self, module: Any) -> bool:
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
        """Put `wrapper(tensors, run)` around every backward pass; `run(tensors)` performs it."""
        self.backward_wrappers.append(wrapper)
        try:
            yield
        finally:
            self.backward_wrappers.remove(wrapper)

    @contextlib.contextmanager
    def before_iterators(self, hook: Callable[[Any], None]) -> Iterator[None]:
        """Call `hook(loader)` each time before a DataLoader makes an iterator."""
        self.iterator_hooks.append(hook)
        try:
            yield
        finally:
            self.iterator_hooks.remove(hook)


def _bind(wrapper: Wrapper, module: Any, inner: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: wrapper(module, inner)
