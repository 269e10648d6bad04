"""Watch an unmodified script's training loop through its calls: optimizer, backward, loader, outermost module.

Patches on entry points and torch's own global optimizer hooks; they cost about a microsecond per step, plus a tenth of
one per module inside a model. In a *window* the time of each kind of call is added up too, so that a step splits into

    data         waiting for the loader that feeds training
    transfer     host to device, where the device is not the host
    forward      outermost modules, with gradients enabled
    backward     autograd
    optimizer    optimizer.step, without what its closure runs
    communication  waiting for other ranks: see `communication_calls`
    sync         waiting for the device because the script reads a value
    evaluation   modules without gradients, and the loader that feeds them
    other        the rest: the script's own Python, tensor operations outside modules

Where the weights are on a GPU, this is GPU time, busy or idle: see `spans`. Only the main thread of the first process
is watched; in forked workers everything is off.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from flatout.levers.subject import BackwardWrapper, Handles, Subject
from flatout.machine.heap_pieces import fill_freed_pieces
from flatout.machine.process_memory import minor_faults
from flatout.script.communication_calls import NOT_WATCHED, REPLACED, CommunicationCalls, not_seen_because
from flatout.script.device_calls import DeviceCalls, device_name, device_of
from flatout.script.own_calls import OwnCalls
from flatout.script.patches import ImportWatch, Patches, noting
from flatout.script.spans import OpenRow, Reading, Span, Spans, StepRow, Timeline
from flatout.script.step_hooks import PassedSteps, StepHook, steps_around
from flatout.script.steps import StepFinder
from flatout.script.weights import WeightProbe
from flatout.torch_private.attributes import LOADER_ITERATOR
from flatout.torch_private.compiler import DYNAMO, compile_was_asked_for, frames_traced, never_compiled
from flatout.torch_private.late import dispatch
from flatout.tracebacks import leave_no_frame

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from flatout.script.step_look import StepLook

STEPS_WITH_CLOSER_LOOK = 3
OTHERS_THAT_RESUME = 64

Call = Callable[..., object]
"""One of torch's functions, or the wrapper of one."""


class OpenStep(NamedTuple):
    """An optimizer step in progress."""

    identity: int
    span: Span | None


class Watch:
    """The observer. Callbacks: `at_boundary()` after each step, `at_backward(tensors)` before each backward pass,
    `before_optimizer(optimizer)` before each optimizer step. The script's exceptions pass through unchanged, and none
    of its calls is made twice."""

    def __init__(self, subject: Subject | None = None) -> None:
        self.subject = subject or Subject(training_only=True)
        self.finder = StepFinder()
        self.steps = 0
        self.backwards = 0
        self.enabled = False
        self.inside = False
        self.rows: list[OpenRow] | None = None
        self.at_boundary: list[Callable[[], None]] = []
        self.at_call: list[Callable[[], None]] = []
        """Called before the script calls a module that no other module calls; not while suspended."""
        self.at_backward: list[Callable[[tuple[Tensor, ...]], None]] = []
        self.before_optimizer: list[Callable[[Optimizer], None]] = []
        self.at_iterator: list[Callable[[DataLoader[object], float], None]] = []
        """Called when a loader that feeds training has made an iterator, with the loader and the time before."""
        self.at_batch: list[Callable[[DataLoader[object] | None, object], None]] = []
        """Called with each batch that a loader returns, and that loader; not while suspended."""
        self.look: StepLook | None = None
        """Inspects the current step more closely."""
        self.saw_autocast = False
        self.saw_scaler = False
        self.saw_create_graph = False
        self.gradients_zeroed: bool | None = None
        """Does the script's zero_grad fill gradients with zeros? None: not called yet."""
        self.device_calls = DeviceCalls(self._enter_device_call, self._leave)
        self._own_calls = OwnCalls(self._enter_own_call, self._leave)
        self.communication_calls = CommunicationCalls(self._enter_device_call, self._leave, self._enter_in_pass)
        self.communication_unknown_because = NOT_WATCHED
        """Why the last window does not tell how long the process waited for other ranks; '' where it does."""
        self._spans = Spans()
        self._patches = Patches()
        self._loader_patch = Patches()
        """Of a loader's next batch, which no compiled code calls."""
        self._lasting_patches = Patches()
        self._weights = WeightProbe()
        self._optimizers_open: list[OpenStep] = []
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        """Those that stepped, by their identity, which a later one may have when they are gone."""
        self._loader_of: weakref.WeakKeyDictionary[
            Iterator[object], tuple[weakref.ref[DataLoader[object]], DataLoader[object] | None]
        ] = weakref.WeakKeyDictionary()
        """Iterator -> its loader, which this keeps alive (`for batch in DataLoader(...)` holds no reference), except
        where the loader holds its iterator (persistent workers), so that both can be freed."""
        self._last_loader: weakref.ref[DataLoader[object]] | None = None
        self._without_weights: Handles[nn.Module] = Handles()
        self._evaluated: Handles[nn.Module] = Handles()
        """Modules that are called without gradients."""
        self._called_in: dict[int, tuple[int, bool]] = {}
        """By their identity, as a script's module may compare in any way: the latest step, and whether they belong to
        it."""
        self._main_thread = threading.get_ident()
        self._row_start: Reading = None
        self._row_faults = 0
        self._row_backwards = 0
        self.suspended = False
        self.boundary_every = 1
        """While suspended, one step in this many is a boundary."""
        self._passing = PassedSteps(self._optimizer_ends, lambda: False)
        self._dynamo_watch = ImportWatch({DYNAMO: self._dynamo_imported}, before={DYNAMO: self._patches.undo})
        self._step_starts = StepHook({}, self._optimizer_starts)
        self._step_ends = StepHook({}, self._passing.hook)
        self._in_backward = False
        self._compiling: Callable[[], bool] = lambda: False
        self._grad_enabled: Callable[[], bool] = lambda: True
        self._autocast_enabled: Callable[[str], bool] = lambda device: False

    @property
    def step_kind(self) -> str | None:
        """What ends a step; None: not recognized yet."""
        return self.finder.kind

    def install(self, torch: ModuleType) -> None:
        """Patch torch's entry points. Call it right after torch has been imported."""
        import torch.utils.data

        from flatout.torch_private.modules import OPTIMIZER_POST_HOOKS, OPTIMIZER_PRE_HOOKS

        self.enabled = True
        self._compiling = torch.compiler.is_compiling
        self._grad_enabled = torch.is_grad_enabled
        self._autocast_enabled = torch.is_autocast_enabled
        # The cheaper of torch's two functions, as this runs in every step.
        self._passing = PassedSteps(self._optimizer_ends, torch.compiler.is_dynamo_compiling)
        self._step_ends = StepHook(OPTIMIZER_POST_HOOKS, self._passing.hook)
        self._step_starts = StepHook(OPTIMIZER_PRE_HOOKS, self._optimizer_starts)
        self._step_ends.add()
        os.register_at_fork(after_in_child=self.disable)
        self._lasting_patches.replace(torch.utils.data.DataLoader, "__iter__", self._wrap_loader_iter)
        self._patch()
        if DYNAMO not in sys.modules:
            self._dynamo_watch.install()

    def _dynamo_imported(self, dynamo: ModuleType) -> None:
        """It identifies torch's functions by identity, so it must be imported while they are the originals."""
        self._patches.accept_references()
        if self.enabled and not self.suspended:
            self._patches.redo()

    def _patch(self) -> None:
        """Everything but the hook that counts steps and the patch that is called once per epoch."""
        import torch

        from flatout.torch_private.loading import BaseIterator

        self._step_starts.add()
        self._patches.replace(torch.autograd, "backward", lambda original: self._wrap_pass(original, "tensors"))
        self._patches.replace(torch.autograd, "grad", lambda original: self._wrap_pass(original, "outputs"))
        self._patches.replace(torch.nn.Module, "__call__", self._wrap_module_call)
        self._patches.replace(torch.amp.grad_scaler.GradScaler, "scale", noting(self._note_scale))
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._patches.replace(owner, "zero_grad", noting(self._note_zero_grad))
        self._loader_patch.replace(BaseIterator, "__next__", self._wrap_next)

    def uninstall(self) -> None:
        self.disable()
        self._patches.undo()
        self._loader_patch.undo()
        self._step_starts.remove()
        self._lasting_patches.undo()
        self._dynamo_watch.remove()
        self._step_ends.remove()

    def _unpatch(self) -> None:
        if not compile_was_asked_for():  # its guards hold our wrappers: they stay, and pass calls through
            self._patches.undo()
        self._loader_patch.undo()
        self._step_starts.remove()

    def suspend(self, boundary_every: int = 1) -> None:
        """Until `resume`, only count the leader's steps: for quick steps even a few microseconds matter.

        Every `boundary_every`-th counted step is a boundary. Does nothing unless steps end with an optimizer, no lever
        wraps a call and no window is open.
        """
        if self.finder.kind != "optimizer" or self.rows is not None or self.subject.in_use:
            return
        self.suspended, self.boundary_every = True, boundary_every
        self._optimizers_open.clear()
        self._unpatch()
        fill_freed_pieces()  # left by our imports, and by watching until now

    def resume(self) -> None:
        """Watch whole steps again; stays suspended where the script has replaced torch's functions, or has used
        torch.compile meanwhile."""
        if not self.suspended or not self.enabled:
            return
        self.count_passed()
        if not (self._patches.are_reached if compile_was_asked_for() else self._patches.redo()):
            return
        if not self._loader_patch.redo():
            self._unpatch()
            return
        self.suspended = False
        self._step_starts.add()

    def count_passed(self, *, leader_steps: bool = False) -> None:
        """Add the steps that passed since the last boundary and, unless the leader is stepping now, those of optimizers
        that took over."""
        passed, others = self._passing.take()
        self.steps += passed
        self.finder.leader_passed(passed)
        for identity in [] if leader_steps else others:
            self.finder.optimizer_stepped(identity)

    def _count_suspended(self, optimizer: Optimizer) -> None:
        if id(optimizer) != self.finder.leader:
            self._follow_to_its_end(optimizer)
            if not self.finder.may_lead(id(optimizer)):
                if self._passing.note_other(id(optimizer)) > OTHERS_THAT_RESUME:  # another phase, another optimizer
                    self.resume()
                return
            if steps_around(sys._getframe(3)):  # that of torch's wrapper around this step
                return  # it is a part of another one's
            self.resume()
        self.count_passed(leader_steps=True)
        if self.finder.optimizer_stepped(id(optimizer)):
            self._boundary()
        if self.suspended:
            self._passing.grant(self.finder.leader, self.boundary_every - 1)

    def batches_yielded(self, loader: DataLoader[object]) -> int | None:
        """By the newest iterator of this loader that is in use; None: there is none."""
        from flatout.torch_private.loading import BaseIterator, yielded_by

        found = None
        for iterator, (reference, _) in list(self._loader_of.items()):
            if reference() is loader and isinstance(iterator, BaseIterator):
                found = yielded_by(iterator)
        return found

    def disable(self) -> None:
        """As in a process that the script has forked, such as a loader's worker."""
        self.enabled = False

    def enable(self) -> None:
        """In a process that was forked to go on as the script's own."""
        self.enabled = True

    def open_window(self) -> None:
        """From now on record a row with the parts of each step."""
        name, device = device_name(self.subject), device_of(self.subject)
        self._spans = Spans(Timeline(None if device.kind == "cpu" else device))
        self.rows = []
        self._row_backwards = 0
        if not compile_was_asked_for():
            self._own_calls.install()
            if name != "cpu":
                self.device_calls.install(sys.modules["torch"])
        self.communication_unknown_because = not_seen_because(self.subject, name)
        if not self.communication_unknown_because and not self.communication_calls.install():
            self.communication_unknown_because = REPLACED
        self._row_faults, self._row_start = minor_faults(), self._spans.timeline.mark()

    def close_window(self) -> list[StepRow]:
        self.device_calls.uninstall()
        self._own_calls.uninstall()
        self.communication_calls.uninstall()
        rows, self.rows = self.rows or [], None
        return [self._spans.read(row) for row in rows] if self._spans.timeline.wait() else []

    def _enter_device_call(self, kind: str) -> Span | None:
        return self._spans.enter(kind) if self.rows is not None and self._here() else None

    def _enter_in_pass(self, kind: str) -> Span | None:
        """In the thread that ends a backward pass, while the script's own thread waits for that."""
        return self._spans.enter(kind) if self.rows is not None and self._in_backward else None

    def _leave(self, span: Span | None) -> None:
        """Of a window that was closed meanwhile nothing is recorded."""
        if span is not None and self.rows is not None:
            self._spans.leave(span)

    # what the patched entry points call

    def _here(self) -> bool:
        return self.enabled and threading.get_ident() == self._main_thread

    def _in_autograds_thread(self) -> bool:
        """As a pass of the script's own thread is on a GPU, with what activation checkpointing recomputes in it."""
        return self.enabled and self._in_backward and dispatch().current_graph_task() != -1

    def _optimizer_starts(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._compiling() or not self._here() or self.subject.updating:  # torch.compile must trace torch only
            return
        if self._optimizers_open:  # an exception may have skipped the end of some
            del self._optimizers_open[steps_around(sys._getframe(1)) :]
        if not self._optimizers_open:
            self._follow_to_its_end(optimizer)
            self.subject.optimizers.add(optimizer)
            for callback in self.before_optimizer:
                callback(optimizer)
        span = self._spans.enter("optimizer") if self.rows is not None else None
        self._optimizers_open.append(OpenStep(id(optimizer), span))

    def _follow_to_its_end(self, optimizer: Optimizer) -> None:
        identity = id(optimizer)
        if identity in self._optimizers:
            return

        def gone(_: object) -> None:
            self._optimizers.pop(identity, None)
            self.count_passed()
            self.finder.forget(identity)

        self._optimizers[identity] = weakref.ref(optimizer, gone)

    def _optimizer_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._here() or self.subject.updating:
            return
        if self.suspended:
            self._count_suspended(optimizer)
            return
        if not any(step.identity == id(optimizer) for step in self._optimizers_open):
            return
        step = self._optimizers_open.pop()
        while step.identity != id(optimizer):  # an exception skipped the end of an inner one
            step = self._optimizers_open.pop()
        self._leave(step.span)
        if not self._optimizers_open and self.finder.optimizer_stepped(step.identity):
            self._boundary()

    def _wrap_pass(self, original: Call, first: str) -> Call:
        """`first` names the roots: 'tensors' of `backward`, 'outputs' of `grad` (which accumulates nothing)."""
        watch, accumulates = self, first == "tensors"

        def observed(*args: object, **kwargs: object) -> object:  # torch checks these
            if watch._compiling() or watch.suspended or not watch._here() or watch.inside or watch._in_backward:
                return original(*args, **kwargs)
            if not accumulates and (kwargs.get("create_graph") or args[4:5] == (True,)):
                watch.saw_create_graph = True
                return watch._pass_for_a_loss(original, args, kwargs)
            if not args and first not in kwargs:
                return original(**kwargs)  # let torch report the mistake
            roots = args[0] if args else kwargs.pop(first)
            return watch._pass(original, accumulates, roots, args[1:], kwargs)

        def backward(*args: object, **kwargs: object) -> object:
            try:
                return observed(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return backward

    def _pass(
        self,
        run: Call,
        accumulates: bool,
        tensors: Any,  # a tensor, several, or an iterator of them
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if hasattr(type(tensors), "__torch_function__"):  # what torch takes for a tensor
            roots = (tensors,)
        else:
            tensors = tensors if isinstance(tensors, Sequence) else tuple(tensors)
            roots = tuple(tensors)
        probing = self.finder.needs_weight_changes and not self._optimizers_open
        if probing and self._weights.changed(roots):
            self.finder.weights_changed()
        for callback in self.at_backward:
            callback(roots)
        for wrapper in self.subject.backward_wrappers if accumulates else ():
            run = _wrapped_backward(wrapper, run)
        if self.look is not None:
            run = self.look.around_backward(run)
        span = self._spans.enter("backward") if self.rows is not None else None
        ended = self.communication_calls.backward_begins(roots) if self.communication_calls.on else None
        self._in_backward = True
        try:
            result = run(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
            if ended is not None:
                ended()
            self._leave(span)
        self.backwards += 1
        self._row_backwards += 1
        if probing:
            self._weights.remember()
        if not self._optimizers_open and self.finder.backward_ended(fresh=self._weights.fresh or not accumulates):
            self._boundary()
        return result

    def _pass_for_a_loss(self, original: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """One that is differentiated again, as in a gradient penalty or MAML's inner steps: it takes a backward pass's
        time, but is a part of a loss that is still being computed."""
        span = self._spans.enter("backward") if self.rows is not None else None
        try:
            return original(*args, **kwargs)
        finally:
            self._leave(span)

    def _wrap_module_call(self, original: Call) -> Call:
        watch, compiling = self, self._compiling  # a constant to torch.compile, which sees nothing of ours

        # torch's profiler reads the frame's `self`
        def __call__(self: nn.Module, *args: object, **kwargs: object) -> object:
            try:
                if compiling() or watch.inside or watch.suspended:
                    return original(self, *args, **kwargs)
                return watch._outermost(original, self, args, kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        never_compiled(__call__, self._outermost, self._recomputed)
        return __call__

    def _outermost(
        self, original: Call, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if not self._here() and not self._in_autograds_thread():
            return original(module, *args, **kwargs)
        for callback in self.at_call:
            callback()
        if self._in_backward:  # recomputation by activation checkpointing: not the script's call, but levers act on it
            return self._recomputed(original, module, args, kwargs)
        training = self._grad_enabled()
        if training:
            self._see_module(module)
            if self.steps < STEPS_WITH_CLOSER_LOOK and not self.subject.wrappers:
                self.saw_autocast |= self._autocast_enabled("cpu") or self._autocast_enabled("cuda")
        span = None
        if self.rows is not None:
            span = self._enter_call(module, training)
        self.inside = True
        try:
            if training and self.look is not None:
                return self.look.forward(lambda: original(module, *args, **kwargs), (args, kwargs))
            if not self.subject.wrappers:
                return original(module, *args, **kwargs)
            return self.subject.call(module, lambda: original(module, *args, **kwargs))
        finally:
            self.inside = False
            self._leave(span)

    def _enter_call(self, module: nn.Module, training: bool) -> Span:
        in_step = training or self._is_called_in_every_step(module)
        self._spans.move("pending", "data" if in_step else "evaluation")
        return self._spans.enter("forward" if in_step else "evaluation")

    def _enter_own_call(self, module: nn.Module) -> Span | None:
        if self.rows is None or self.inside or self._in_backward or self._compiling() or not self._here():
            return None
        return self._enter_call(module, self._grad_enabled())

    def _is_called_in_every_step(self, module: nn.Module) -> bool:
        """Of one that is called without gradients: is it a teacher or a target network, whose outputs training needs?
        Such a module is not trained itself, and was called in the step before, or two before."""
        if module in self.subject.modules:
            return False
        if module not in self._evaluated:
            self._evaluated.add(module)
            self._called_in.pop(id(module), None)  # of one that was there before, and is gone
        step, known = self._called_in.get(id(module), (-3, False))
        if step != self.steps:
            known = step >= self.steps - 2
            self._called_in[id(module)] = self.steps, known
        return known

    def _recomputed(
        self, original: Call, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        self.inside = True
        try:
            return self.subject.call(module, lambda: original(module, *args, **kwargs))
        finally:
            self.inside = False

    def _note_scale(self, scaler: GradScaler, *_: object, **__: object) -> None:
        self.saw_scaler |= scaler.is_enabled()

    def _note_zero_grad(self, owner: object, set_to_none: object = True, *_: object, **__: object) -> None:
        if not self._compiling() and self._here():
            self.gradients_zeroed = bool(self.gradients_zeroed) or not set_to_none

    @property
    def inside_optimizer(self) -> bool:
        """Is an optimizer step in progress? Gradients then come from the closure it was given."""
        return bool(self._optimizers_open)

    @property
    def saw_compile(self) -> bool:
        """Has torch.compile traced anything, for the script or a lever?"""
        return frames_traced() > 0

    def _see_module(self, module: nn.Module) -> None:
        if module in self.subject.modules or module in self._without_weights:
            return
        if _has_weights(module) and not (self.steps and self._is_part_of_known(module)):
            self.subject.note_training(module)
            self.subject.modules.add(module)
            self._see_loader()
        elif self.steps:  # before, a script may evaluate with its weights frozen for a while
            self._without_weights.add(module)

    def _see_loader(self) -> None:
        """The loader of the latest batch feeds training. A script may make one for every epoch."""
        loader = self._last_loader() if self._last_loader is not None else None
        if loader is not None and loader not in self.subject.loaders:
            self.subject.loaders.add(loader)

    def _is_part_of_known(self, module: nn.Module) -> bool:
        """Does it share weights with what trained from the first step on? Then it is called for another purpose
        (features, an export) that no trial has covered, and is left alone."""
        known = {id(weight) for model in self.subject.modules for weight in model.parameters()}
        return any(id(weight) in known for weight in module.parameters())

    def _wrap_loader_iter(
        self, original: Callable[[DataLoader[object]], Iterator[object]]
    ) -> Callable[[DataLoader[object]], Iterator[object]]:
        def __iter__(loader: DataLoader[object]) -> Iterator[object]:
            here = self._here()
            for hook in self.subject.iterator_hooks if here else ():
                hook(loader)
            began = time.perf_counter()
            try:
                iterator = original(loader)
            except BaseException as error:
                leave_no_frame(error)
                raise
            if not here:
                return iterator
            kept = getattr(loader, LOADER_ITERATOR, None) is iterator
            with contextlib.suppress(TypeError):  # a script's own loader may return one without weak references
                self._loader_of[iterator] = (weakref.ref(loader), None if kept else loader)
            if loader in self.subject.loaders:
                self.count_passed()
                for callback in self.at_iterator:
                    callback(loader, began)
            return iterator

        return __iter__

    def _wrap_next(self, original: Callable[[Iterator[object]], object]) -> Callable[[Iterator[object]], object]:
        def __next__(iterator: Iterator[object]) -> object:
            span = None
            if not self.suspended and self._here():
                self._last_loader = self._loader_of.get(iterator, (None,))[0]
                span = self._spans.enter("pending") if self.rows is not None else None
            try:
                batch = original(iterator)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._leave(span)
            if self.at_batch and not self.suspended and self._here():
                loader = self._last_loader() if self._last_loader is not None else None
                for callback in self.at_batch:
                    callback(loader, batch)
            return batch

        return __next__

    def may_be_inside_a_step(self) -> bool:
        """May this boundary turn out to be no end of a step, as after a discriminator's first update? Graphs that a
        change of the weights would break may be alive then. True while an optimizer exists that has still to step."""
        from torch.optim import Optimizer

        if not self.finder.leader_is_new:
            return False
        made = sum(issubclass(type(one), Optimizer) for one in gc.get_objects())
        return made > self.finder.optimizers

    def _boundary(self) -> None:
        if self.steps == 0:
            self._weights.forget()
        self.steps += 1
        self._see_loader()
        if self.rows is not None:
            self._close_row()
        for callback in self.at_boundary:
            callback()
        if self.rows is not None:
            self._row_faults, self._row_start = minor_faults(), self._spans.timeline.mark()

    def _close_row(self) -> None:
        assert self.rows is not None
        end, faults = self._spans.timeline.mark(), minor_faults() - self._row_faults
        self._spans.move("pending", "data")
        self.rows.append(OpenRow(self._row_start, end, self._spans.take(), self._row_backwards, faults, self.steps))
        self._row_backwards = 0


def _has_weights(module: nn.Module) -> bool:
    from flatout.torch_private.dispatch import without_torch_function

    try:
        with without_torch_function():  # the script's own modes must not see our operations
            return any(parameter.requires_grad for parameter in module.parameters())
    except Exception:  # the script's own parameters() may raise anything
        return False


def _wrapped_backward(wrapper: BackwardWrapper, inner: Call) -> Call:
    return lambda tensors, *args, **kwargs: wrapper(tensors, lambda t: inner(t, *args, **kwargs))
