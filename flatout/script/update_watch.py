"""The order of backward passes, clips, scalers, zero_grad, schedulers and optimizer steps.

Between two steps of an optimizer the script's calls make one sequence, such as

    zero_grad, backward, clip, step

and a fault is a fault only where the same order comes back step after step.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from flatout.levers.subject import Subject
from flatout.parameters import own_part
from flatout.script.behaviour_seen import (
    BackwardSeen,
    BroadcastSeen,
    ClipSeen,
    IdleSchedulerSeen,
    RemadeOptimizerSeen,
    SchedulerSeen,
    SourceLine,
)
from flatout.script.gradient_watch import GradientWatch, parameters_in
from flatout.script.loss_graph import end_of_graph, numbers_of, pairs_of, parameters_of, takes_softmax_twice
from flatout.script.patches import Patches, around, noting
from flatout.script.places import Places
from flatout.script.step_hooks import StepHook
from flatout.torch_private.attributes import TOTAL_NORM

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

Place = tuple[str, int]
MOST_EVENTS = 8192
MOST_CALLERS = 64
MOST_LOSSES = 5000
LOSSES_BY_ELEMENT = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""They broadcast; others refuse shapes that differ."""
EXAMINED_STEPS = 24
"""Steps at which gradients are measured."""
REACHED_PASSES = 8
"""Backward passes of a line whose graphs are followed to the parameters."""
KEPT_STEPS = 2
"""So long a later pass may still use a retained graph."""


class Event(NamedTuple):
    kind: str
    place: Place
    about: frozenset[int]
    """Ids of parameters or of an optimizer; empty: of all."""


@dataclass
class _Backwards:
    calls: int = 0
    callers: set[tuple[Place, ...]] = field(default_factory=set)
    """The lines of the script from which each pass was called, from the innermost out."""
    retained: int = 0
    needed: int = 0
    scaled: int = 0
    graphs: int = 0
    softmax_twice: int = 0
    reductions: Counter[str] = field(default_factory=Counter)
    reached: set[int] = field(default_factory=set)
    """Ids of the parameters that the graphs lead to."""


@dataclass
class _Clips:
    steps: int = 0
    before_backward: int = 0
    before_unscale: int = 0


@dataclass
class _Schedule:
    calls: int = 0
    between: int = 0


@dataclass
class _Retained:
    place: Place
    numbers: frozenset[int]
    step: int
    needed: bool = False


class _OptimizerState:
    """What is followed of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.kind = weakref.ref(optimizer), type(optimizer).__name__
        self.parameters = {id(one) for one in parameters_in(optimizer)}
        self.since: int | None = None
        """Index of the first event after its last step; None: it has not stepped in the window."""
        self.place: Place = ("", 0)
        self.by_closure = False
        """Was its last step given a closure, which runs the backward pass inside of the step?"""
        self.stops_itself = False
        """Does it leave the weights alone once it has converged, as LBFGS does? Not where its rate is 0, or where it
        has no gradient to follow."""
        self.cleared = self.arrived = False
        """Were its gradients empty at some time since its last step, and did new ones arrive?"""
        self.accumulated = self.zeroed = 0
        self.followed: list[weakref.ref[Tensor]] = []
        self.used_zeros = False
        """Were the gradients of the last step nothing but zeros? Then it is not known whether they were cleared."""
        self.removes: list[Callable[[], None]] = []
        self.steps = self.remade = 0
        """remade: steps of an optimizer that was made since the step before, and keeps state from step to step."""
        self.is_new = True
        """Has this very optimizer stepped once at most?"""

    def is_replaced_by(self, optimizer: Optimizer, place: Place) -> bool:
        """Does this optimizer step in place of the one that is followed here? Not one whose parameters only have the
        ids of parameters that are gone."""
        same = self.place == place and self.parameters == {id(one) for one in parameters_in(optimizer)}
        return same and all(one() is not None for one in self.followed)


class UpdateWatch:
    """Between `start` and `stop`, in the thread in which it was made. `guard` runs a function of ours such that none of
    its errors reach the script."""

    def __init__(self, places: Places, guard: Callable[[Callable[[], object]], None]) -> None:
        self._places, self._guard = places, guard
        self._patches = Patches()
        self._on, self._thread = False, threading.get_ident()
        self._subject = Subject()
        self._first_event = 0
        self._events: list[Event] = []
        self._states: dict[int, _OptimizerState] = {}
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that have had a state."""
        self._backwards: dict[Place, _Backwards] = {}
        self._clips: dict[Place, _Clips] = {}
        self._schedules: dict[Place, _Schedule] = {}
        self._retained: list[_Retained] = []
        self._losses: dict[Place, list[float]] = {}
        self._pending_loss: float | None = None
        self._broadcast: dict[tuple[Place, tuple[str, str]], int] = {}
        self.gradients = GradientWatch()
        self._stepping = StepHook({}, self._before_step)
        """Before steps alone: torch must not find one more hook, or one less, while it calls those after a step, and
        a window begins and ends there."""
        self._zero_seconds = 0.0
        self._zeroing = self._scheduling = False
        self.zero_place: Place | None = None
        self.zero_fills: bool | None = None
        self.scaler = False
        self.anomaly = False
        """Was anomaly detection on in a backward pass?"""
        self.steps = 0
        self.on_backward: Callable[[bool], None] = lambda begins: None
        self.on_step: Callable[[], None] = lambda: None

    def start(self, subject: Subject, *, compiled: bool = False) -> None:
        """compiled: code of the script is, and may call losses, which must not change under it."""
        import torch
        from torch.nn.utils import clip_grad
        from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

        from flatout.torch_private.modules import OPTIMIZER_PRE_HOOKS

        self._on, self._subject = True, subject
        self._stepping = StepHook(OPTIMIZER_PRE_HOOKS, self._before_step)
        self._stepping.add()
        replace = self._patches.replace
        replace(torch.autograd, "backward", around(self._backward_begins, lambda *_: self.on_backward(False)))
        replace(torch.autograd, "grad", noting(self._note_grad))
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            replace(owner, "zero_grad", around(self._zero_begins, self._zeroed))
        if hasattr(clip_grad, TOTAL_NORM):
            replace(clip_grad, TOTAL_NORM, noting(self._note_clip_of_gradients))
        else:
            replace(torch.nn.utils, "clip_grad_norm_", noting(self._note_clip_of_parameters))
        replace(torch.nn.utils, "clip_grad_value_", noting(self._note_clip_of_parameters))
        for name in () if compiled else LOSSES_BY_ELEMENT:
            replace(torch.nn.functional, name, noting(self._note_loss_by_element))
        scaler = torch.amp.grad_scaler.GradScaler
        replace(scaler, "scale", noting(self._note_scale))
        replace(scaler, "unscale_", noting(self._note_unscale))
        for schedule in _with_own_step([LRScheduler, ReduceLROnPlateau]):
            replace(schedule, "step", around(self._schedule_begins, self._scheduled))

    def stop(self) -> None:
        self._on = False
        self._patches.undo()
        self._stepping.remove()
        for state in self._states.values():
            for remove in state.removes:
                remove()
            state.removes.clear()
        self.gradients.stop()

    def step_ended(self) -> None:
        """A training step of the script is over."""
        self.steps += 1
        self._guard(self.gradients.compare)
        self._retained = [one for one in self._retained if self._keep(one)]

    # what the script calls

    def _listens(self) -> bool:
        return self._on and threading.get_ident() == self._thread

    def _here(self, kind: str, about: Iterable[int] = ()) -> Place:
        place = self._places.here()
        self._events.append(Event(kind, place, frozenset(about)))
        if len(self._events) > MOST_EVENTS:
            dropped = MOST_EVENTS // 2
            del self._events[:dropped]
            self._first_event += dropped
        return place

    def _backward_begins(self, *args: object, **kwargs: object) -> bool | None:
        if not self._listens():
            return None
        place = self._here("backward")
        callers = self._places.callers()
        self._guard(lambda: self._note_backward(place, callers, args, kwargs))
        self.on_backward(True)
        return True

    def _note_backward(
        self, place: Place, callers: tuple[Place, ...], args: Sequence[object], kwargs: dict[str, object]
    ) -> None:
        import torch
        from torch import Tensor

        self.anomaly |= torch.is_anomaly_enabled()
        found = self._backwards.setdefault(place, _Backwards())
        found.calls += 1
        if len(found.callers) < MOST_CALLERS:
            found.callers.add(callers)
        given = args[0] if args else kwargs.get("tensors")
        root = given[0] if isinstance(given, list | tuple) and given else given
        if not isinstance(root, Tensor):
            return
        scaled, reduction = end_of_graph(root, self.scaler)
        found.scaled += scaled
        if reduction:
            found.reductions[reduction] += 1
        if root.numel() == 1 and not root.is_complex():
            values = self._losses.setdefault(place, [])
            if len(values) < MOST_LOSSES:
                pending, self._pending_loss = self._pending_loss, None
                values.append(float(own_part(root.detach())) if pending is None else pending)
        if found.calls <= REACHED_PASSES:
            reached = parameters_of(root)
            self.gradients.reach(reached)
            found.reached |= {id(one) for one in reached}
            found.graphs += 1
            found.softmax_twice += takes_softmax_twice(root)
            if pairs := pairs_of(root):
                self._note_broadcast(place, *pairs)
        self._note_retained(place, root, args, kwargs)

    def _note_retained(self, place: Place, root: Tensor, args: Sequence[object], kwargs: dict[str, object]) -> None:
        retain = kwargs.get("retain_graph", args[2] if len(args) > 2 else None)
        create = kwargs.get("create_graph", args[3] if len(args) > 3 else False)
        wanted = bool(retain) and not create
        if not wanted and not self._retained:
            return
        numbers = self._note_needed(root)
        if wanted:
            self._backwards[place].retained += 1
            if numbers is None:  # too large to compare
                self._backwards[place].needed += 1
            else:
                self._retained.append(_Retained(place, numbers, self.steps))

    def _keep(self, one: _Retained) -> bool:
        return not one.needed and self.steps - one.step <= KEPT_STEPS

    def _note_needed(self, root: Tensor) -> frozenset[int] | None:
        """Which retained graphs a pass from here uses again. Returns the numbers of its own."""
        numbers = numbers_of(root)
        for one in self._retained:
            if not one.needed and (numbers is None or not one.numbers.isdisjoint(numbers)):
                one.needed = True
                self._backwards[one.place].needed += 1
        return numbers

    def _note_grad(self, outputs: object = None, *args: object, **kwargs: object) -> None:
        from torch import Tensor

        root = outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs
        if self._retained and isinstance(root, Tensor) and self._listens():
            self._guard(lambda: self._note_needed(root))

    def _zero_begins(self, *args: object, **kwargs: object) -> tuple[float, bool] | None:
        if self._zeroing or not self._listens():  # Module.zero_grad of a wrapper may call another
            return None
        self._zeroing = True
        return time.perf_counter(), not kwargs.get("set_to_none", args[1] if len(args) > 1 else True)

    def _zeroed(self, begun: tuple[float, bool], result: object) -> None:
        began, fills = begun
        self._zeroing = False
        self._zero_seconds += time.perf_counter() - began
        self.zero_place = self._here("zero")
        self.zero_fills = bool(self.zero_fills) or fills
        for state in self._states.values():  # another optimizer's, or a part of the model: not all of them
            followed = [one for reference in state.followed if (one := reference()) is not None]
            state.cleared |= bool(followed) and all(one.grad is None for one in followed)

    def _note_clip_of_gradients(self, tensors: object = None, *args: object, **kwargs: object) -> None:
        if self._listens():
            gradients = {id(one) for one in tensors} if isinstance(tensors, list | tuple) else set()
            about = {
                id(one)
                for state in self._states.values()
                for one in parameters_in(state.optimizer())
                if id(one.grad) in gradients
            }
            self._here("clip", about)

    def _note_clip_of_parameters(self, *args: object, **kwargs: object) -> None:
        if self._listens():
            self._here("clip")

    def _note_loss_by_element(self, *args: object, **kwargs: object) -> None:
        import torch
        from torch import Tensor

        predictions = args[0] if args else kwargs.get("input")
        targets = args[1] if len(args) > 1 else kwargs.get("target")
        if not torch.is_grad_enabled() or not self._listens():
            return
        if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor):
            return
        if predictions.shape != targets.shape and not _pairs_are_meant(predictions, targets, kwargs.get("reduction")):
            place = self._places.here()
            self._guard(lambda: self._note_broadcast(place, predictions.shape, targets.shape))

    def _note_broadcast(self, place: Place, predictions: Sequence[int], targets: Sequence[int]) -> None:
        """Only where the result has more elements than either: then each is compared with every other one."""
        import torch

        try:
            together = math.prod(torch.broadcast_shapes(tuple(predictions), tuple(targets)))
        except RuntimeError:
            return  # the script's own error, in a moment
        if together > max(math.prod(predictions), math.prod(targets)):
            shapes = str([*predictions]), str([*targets])
            self._broadcast[place, shapes] = self._broadcast.get((place, shapes), 0) + 1

    def broadcast_losses(self) -> tuple[BroadcastSeen, ...]:
        return tuple(
            BroadcastSeen(line=self._places.line(place), predictions=predictions, targets=targets, calls=calls)
            for (place, (predictions, targets)), calls in self._broadcast.items()
        )

    def _note_scale(self, scaler: GradScaler, outputs: object = None, *args: object, **kwargs: object) -> None:
        if not scaler.is_enabled() or not self._listens():
            return
        self.scaler = True
        self._here("scale")

        def note() -> None:
            from torch import Tensor

            if isinstance(outputs, Tensor) and outputs.numel() == 1:
                self._pending_loss = float(own_part(outputs.detach()))

        self._guard(note)

    def _note_unscale(self, scaler: GradScaler, optimizer: object = None, *args: object, **kwargs: object) -> None:
        if scaler.is_enabled() and self._listens():
            self._here("unscale", [id(optimizer)])

    def _schedule_begins(self, scheduler: object, *_: object, **__: object) -> bool | None:
        if self._scheduling or not self._listens():  # one of another one, or of its base class
            return None
        self._scheduling = True
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None:
            place = self._here("schedule", [id(optimizer)])
            self._schedules.setdefault(place, _Schedule()).calls += 1
        return True

    def _scheduled(self, begun: bool, result: object) -> None:
        self._scheduling = False

    # around an optimizer's step

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        import torch

        if not torch.compiler.is_compiling() and self._listens():
            place = self._places.here()
            by_closure = _has_closure(args, kwargs)
            self._guard(lambda: self._judge(optimizer, place, by_closure=by_closure))
            self.on_step()

    def _judge(self, optimizer: Optimizer, place: Place, *, by_closure: bool) -> None:
        self.gradients.compare()
        state = self._states.get(id(optimizer))
        if state is None or state.optimizer() is not optimizer:  # a new one may have the id of one that is gone
            state = self._state_of_new(optimizer, place, by_closure=by_closure)
        else:
            state.is_new = False
        state.place = place
        if state.since is not None:
            self._judge_order(state, self._events[max(0, state.since - self._first_event) :])
            if state.arrived and not state.used_zeros:
                state.zeroed += state.cleared
                state.accumulated += not state.cleared
        state.cleared = state.arrived = False
        used = [
            own_part(one.grad)
            for reference in state.followed
            if (one := reference()) is not None and one.grad is not None
        ]
        state.used_zeros = bool(used) and not any(one.is_sparse or bool(one.any()) for one in used)
        state.since = self._first_event + len(self._events)
        state.steps += 1
        state.by_closure, state.stops_itself = by_closure, by_closure and bool(used) and _has_tolerance(optimizer)
        if state.steps <= EXAMINED_STEPS:
            self.gradients.measure(self._subject.modules, optimizer, state.parameters)
        elif self.gradients.weights_move is False:  # as where a warm-up begins with a rate of 0
            self.gradients.sample(optimizer)

    def _state_of_new(self, optimizer: Optimizer, place: Place, *, by_closure: bool) -> _OptimizerState:
        """Of an optimizer that has none: a new one, or that of the optimizer whose place it takes. Optimizers that take
        turns have one each."""
        known = optimizer in self._known
        self._known.add(optimizer)
        replaced = next((key for key, one in self._states.items() if one.is_replaced_by(optimizer, place)), None)
        if replaced is None or known:
            state = _OptimizerState(optimizer)
            self._follow(state)
        else:
            state = self._states.pop(replaced)
            state.remade += state.is_new and not by_closure and _keeps_state(optimizer)
            state.optimizer, state.kind, state.is_new = weakref.ref(optimizer), type(optimizer).__name__, True
        if (gone := self._states.pop(id(optimizer), None)) is not None:  # its hooks are still to be removed
            self._states[id(gone)] = gone  # the id of no optimizer, as long as it is there
        self._states[id(optimizer)] = state
        return state

    def _judge_order(self, state: _OptimizerState, events: Sequence[Event]) -> None:
        """events: those since the optimizer's last step."""
        optimizer = state.optimizer()
        mine = [one for one in events if not one.about or one.about & (state.parameters | {id(optimizer)})]
        backwards = [index for index, one in enumerate(mine) if one.kind == "backward"]
        clips = [index for index, one in enumerate(mine) if one.kind == "clip"]
        unscaled = [index for index, one in enumerate(mine) if one.kind == "unscale"]
        scales = any(one.kind == "scale" for one in mine)
        if not backwards:
            return
        for place in {mine[index].place for index in clips}:
            found = self._clips.setdefault(place, _Clips())
            found.steps += 1
            found.before_backward += max(clips) < backwards[0]
            own = [index for index in clips if mine[index].place == place]
            found.before_unscale += scales and own[0] > backwards[0] and not any(one < own[0] for one in unscaled)
        if state.by_closure:
            return  # these passes were a part of the last step, so the scheduler that follows is not early
        for index, one in enumerate(mine):
            if one.kind == "schedule" and index > backwards[-1]:
                self._schedules.setdefault(one.place, _Schedule()).between += 1

    def _follow(self, state: _OptimizerState) -> None:
        """See gradients arrive at a few of its parameters."""
        from torch.utils.hooks import unserializable_hook

        with_gradient = [one for one in parameters_in(state.optimizer()) if one.requires_grad and one.grad is not None]
        for parameter in with_gradient[:: max(1, len(with_gradient) // 2)][:2]:
            reference = weakref.ref(parameter)

            def arrives(gradient: Tensor, reference: weakref.ref[Tensor] = reference) -> None:
                if self._on:
                    self._guard(lambda: self._arrived(state, reference()))

            state.followed.append(reference)
            # Otherwise torch warns where the script saves the parameter.
            state.removes.append(parameter.register_hook(unserializable_hook(arrives)).remove)

    def _arrived(self, state: _OptimizerState, parameter: Tensor | None) -> None:
        state.arrived = True
        if not state.cleared and parameter is not None:
            gradient = parameter.grad
            state.cleared = gradient is None or gradient.is_sparse or not bool(own_part(gradient).any())

    # what was found

    def backwards(self) -> tuple[BackwardSeen, ...]:
        return tuple(
            BackwardSeen(
                line=self._places.line(place),
                calls=one.calls,
                per_step=one.calls / max(1, self.steps),
                callers=len(one.callers),
                retained=one.retained - sum(kept.place == place and not kept.needed for kept in self._retained),
                retained_needed=one.needed,
                scaled=one.scaled > one.calls / 2,
                reduction=one.reductions.most_common(1)[0][0] if one.reductions else "",
                graphs=one.graphs,
                softmax_twice=one.softmax_twice,
            )
            for place, one in self._backwards.items()
        )

    def clips(self) -> tuple[ClipSeen, ...]:
        return tuple(ClipSeen(line=self._places.line(place), **vars(one)) for place, one in self._clips.items())

    def schedulers(self, warned: bool) -> tuple[SchedulerSeen, ...]:
        return tuple(
            SchedulerSeen(line=self._places.line(place), calls=one.calls, between=one.between, warned=warned)
            for place, one in self._schedules.items()
        )

    def idle_schedulers(self, schedulers: Iterable[object]) -> tuple[IdleSchedulerSeen, ...]:
        """Of these, those that have not stepped since they were made, and whose optimizer has stepped."""
        steps = {id(state.optimizer()): state.steps for state in self._states.values()}
        return tuple(
            IdleSchedulerSeen(kind=type(one).__name__, steps=steps[id(optimizer)])
            for one in schedulers
            if (optimizer := getattr(one, "optimizer", None)) is not None and id(optimizer) in steps
            if getattr(one, "last_epoch", None) == 0
        )

    def remade_optimizers(self) -> tuple[RemadeOptimizerSeen, ...]:
        return tuple(
            RemadeOptimizerSeen(line=self._places.line(one.place), kind=one.kind, remade=one.remade, steps=one.steps)
            for one in self._states.values()
            if one.remade
        )

    def losses(self) -> tuple[float | None, ...]:
        """Where all backward passes start at one line; a loss among several need not fall."""
        found = next(iter(self._losses.values())) if len(self._losses) == 1 else []
        return tuple(loss if math.isfinite(loss) else None for loss in found)

    def updates(self, identity: int) -> bool:
        """Has an optimizer that holds parameters of the module with this id stepped?"""
        stepped = {one for state in self._states.values() for one in state.parameters}
        return not stepped.isdisjoint(self._parameters_of(identity))

    def learns_through_another(self, identity: int) -> bool:
        """Does each pass that trains the module with this id lead through parameters of another optimizer, which are
        trained in passes of their own?"""
        own = self._parameters_of(identity)
        passes = [one.reached for one in self._backwards.values()]
        apart = [one for one in passes if one.isdisjoint(own)]
        others = [one.parameters for one in self._states.values() if one.parameters.isdisjoint(own)]
        other_models = [held for held in others if any(not one.isdisjoint(held) for one in apart)]
        mine = [one for one in passes if not one.isdisjoint(own)]
        return bool(mine) and all(any(not one.isdisjoint(held) for held in other_models) for one in mine)

    def _parameters_of(self, identity: int) -> set[int]:
        """Ids of the parameters of the module with this id."""
        modules = (module for module in self._subject.modules if id(module) == identity)
        return {id(one) for module in modules for one in module.parameters()}

    @property
    def optimizer_lines(self) -> tuple[SourceLine, ...]:
        return tuple(dict.fromkeys(self._places.line(one.place) for one in self._states.values() if one.place[1]))

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return tuple(one for state in self._states.values() if (one := state.optimizer()) is not None)

    @property
    def accumulated_and_zeroed(self) -> tuple[int, int]:
        """Steps of the optimizer with the most that accumulated: (these, the others)."""
        pairs = ((state.accumulated, state.zeroed) for state in self._states.values())
        return max(pairs, key=lambda pair: pair[0], default=(0, 0))

    @property
    def stop_themselves(self) -> bool:
        """Do all optimizers that step, where they have converged?"""
        stepped = [one for one in self._states.values() if one.steps]
        return bool(stepped) and all(one.stops_itself for one in stepped)

    @property
    def zero_seconds(self) -> float:
        """Per step."""
        return self._zero_seconds / max(1, self.steps)


def _has_closure(args: object, kwargs: object) -> bool:
    """Arguments of an optimizer's step, itself included."""
    given = args[1] if isinstance(args, tuple) and len(args) > 1 else None
    return callable(kwargs.get("closure") if given is None and isinstance(kwargs, dict) else given)


def _keeps_state(optimizer: Optimizer) -> bool:
    """Is a step of it another one after earlier steps? Not of SGD without momentum."""
    from torch.optim import SGD

    return not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups)


def _has_tolerance(optimizer: Optimizer) -> bool:
    return all(group.get("tolerance_grad") is not None and group["lr"] for group in optimizer.param_groups)


def _pairs_are_meant(predictions: Tensor, targets: Tensor, reduction: object) -> bool:
    """As for costs of matches or of quantiles: [8, 1] and [1, 8], each with a dimension for the other, and a result by
    pair. A missing dimension is an oversight whatever is done with the result."""
    return reduction == "none" and predictions.ndim == targets.ndim


def _with_own_step(kinds: Iterable[type]) -> dict[type, None]:
    """Of these classes and all that derive from them, those that define `step` themselves."""
    found: dict[type, None] = {}
    for kind in kinds:
        if "step" in vars(kind):
            found[kind] = None
        found |= _with_own_step(type.__subclasses__(kind))
    return found
