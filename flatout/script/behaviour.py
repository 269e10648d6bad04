"""Watch what a script does for a bounded window of steps, and say it as a Behaviour.

    watch = BehaviourWatch(folder)
    watch.start(subject)             # at the end of a step
    ...                              # after each step of the script: watch.step_ended()
    watch.done                       # enough was seen
    watch.stop()                     # everything is as before
    watch.result().backwards

It is for trials alone: it reads values of tensors, so a GPU waits for it, and it slows steps down. Nothing is timed
while it is on except what it times itself. No error in here reaches the script: it ends the watching, and is a note.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, TypeVar

from flatout.environment import variables
from flatout.levers.observed import StepWork
from flatout.levers.subject import Subject
from flatout.machine.process_memory import page_fault_seconds
from flatout.parameters import names_of_types, parameters_of
from flatout.precision.fused_sgd import types_lost_by
from flatout.script.behaviour_seen import Behaviour, CompileSeen, GraphBreakSeen, ParallelSeen, WorkersSeen
from flatout.script.describe import own_source_files
from flatout.script.device_calls import device_name
from flatout.script.forward_watch import ForwardWatch
from flatout.script.kept_graphs import KeptGraphs
from flatout.script.line_sampler import LineSampler
from flatout.script.places import Places
from flatout.script.seeds import UNSEEDED
from flatout.script.tensor_calls import TensorCalls
from flatout.script.update_watch import UpdateWatch
from flatout.torch_private.compiler import (
    compilations,
    compile_was_asked_for,
    compiled_versions,
    compiling_seconds,
    graph_breaks,
)
from flatout.torch_private.dispatch import current_dispatch_mode, profiler_is_on, without_torch_function

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

T = TypeVar("T")

FEW_STEPS, USUAL_STEPS, MOST_STEPS = 16, 60, 2000
USUAL_SECONDS, LONG_SECONDS, LONGEST_SECONDS = 5.0, 15.0, 40.0
"""A window has the usual steps and the usual time, so that evaluation after a short epoch is in it; where steps are
slow, few steps are enough after a long time."""
SLOWING_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "INFO"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_SHOW_DISPATCH_TRACE": ("1",),
}
LEAST_SEED = 1 << 32
"""A seed that nobody chose has 53 random bits."""
FOLLOWED_STEP, HELD_STEPS = 2, 8
DENORMAL_LINES = 3
SCHEDULER_WARNING = "Detected call of `lr_scheduler.step()` before `optimizer.step()`"


class BehaviourWatch:
    """folder: the script's; its files are named relative to it."""

    def __init__(self, folder: str) -> None:
        self._places = Places(folder)
        self._sampler = LineSampler(self._places, threading.get_ident())
        self._forward = ForwardWatch(self._places, self._guard)
        self._sampler.evaluates = lambda: self._forward.evaluating
        self._update = UpdateWatch(self._places, self._guard)
        self._calls = TensorCalls(self._places, self._guard)
        self._sampler.waits = lambda: self._calls.waiting
        self._kept = KeptGraphs()
        self._stack = ExitStack()
        self._subject = Subject()
        self._thread = threading.get_ident()
        self._fault = ""
        self._began: float | None = None
        self._seconds = self._system_from = self._system_seconds = 0.0
        self._steps = 0
        self._compiled_before = 0
        self._compiling_before: float | None = None
        self._allocations_before: int | None = None
        self._debug: tuple[str, ...] = ()
        self._seeded = False
        self._starts: list[tuple[float, int, tuple[str, int]]] = []
        self._waiting: tuple[float, DataLoader[object]] | None = None
        self._start_seconds: list[float] = []
        self._synchronised: dict[int, int] = {}
        self._without_gradient: dict[int, set[int]] = {}
        """Wrapper that searches for unused parameters -> those that got no gradient in some step, by their ids."""
        self._work: StepWork | None = None
        self._denormals: Counter[tuple[str, int]] = Counter()
        """How many, by the line whose operators take or give them."""
        self._finish_work: Callable[[], StepWork] | None = None
        self._followed_from = self._not_counted = 0.0
        self._was_frozen = False
        self._held: list[object] = []
        self._schedulers: Sequence[object] = ()
        self._result: Behaviour | None = None

    def start(self, subject: Subject) -> None:
        """Watch from here on. Call it in the thread that trains, at the end of a step."""
        self._subject = subject
        self._guard(lambda: self._remember_state(subject))
        compiled = compile_was_asked_for()
        self._update.on_backward = self._backward
        self._update.on_step = self._forward.interrupted
        self._stack.enter_context(subject.before_iterators(self._iterator))
        self._guard(lambda: self._update.start(subject, compiled=compiled))
        if not compiled:  # compiled code must not see wrappers of ours that it was not compiled with
            self._guard(self._forward.start)
            self._guard(lambda: self._calls.start(on_gpu=device_name(subject) != "cpu"))
        self._hold()
        self._guard(self._kept.begin)
        self._guard(self._find_schedulers)
        self._was_frozen = gc.get_freeze_count() > 0
        gc.freeze()  # what is there already is not looked through again at each step
        self._began, self._system_from = time.perf_counter(), os.times().system
        self._sampler.start()

    def step_ended(self) -> None:
        """A training step of the script is over."""
        if self._began is None or self._result is not None:
            return
        now = time.perf_counter()
        self._steps += 1
        self._seconds = now - self._began - self._not_counted
        self._sampler.step_ended()
        self._update.step_ended()
        self._forward.steps = self._steps
        self._guard(self._note_first_batch)
        self._guard(self._note_unused)
        self._seeded = (
            self._seeded or _is_seeded()
        )  # here too: a seed may hold only while a library trains, under fork_rng
        if self._steps <= HELD_STEPS:
            self._hold()
        if not self._kept.done:
            self._guard(self._kept.step_ended)
            self._began += time.perf_counter() - now  # the time of the examination is not the script's
        self._guard(self._follow_one_step)

    @property
    def done(self) -> bool:
        """Is the window over? Its end is the caller's to choose where the script ends earlier."""
        if self._fault:
            return True
        usual = self._steps >= USUAL_STEPS and self._seconds >= USUAL_SECONDS
        slow = self._steps >= FEW_STEPS and self._seconds >= LONG_SECONDS
        return usual or slow or self._steps >= MOST_STEPS or self._seconds >= LONGEST_SECONDS

    def stop(self) -> None:
        """End the window: take all patches off, and determine the result."""
        if self._began is None or self._result is not None:
            return
        self._system_seconds = os.times().system - self._system_from
        self._sampler.stop()
        if self._steps:
            self._sampler.drop_since_step()
        if self._finish_work is not None:
            self._finish_work()  # of a step that did not end
        self._update.stop()
        self._forward.stop()
        self._calls.stop()
        self._stack.close()
        gc.collect()  # graphs in cycles: whether a forward was used is known when its graph goes
        gc.unfreeze()
        try:
            with without_torch_function():
                self._result = self._made()
        except Exception as error:
            self._result = Behaviour(steps=self._steps, seconds=self._seconds, notes=(_said(error),))
        if self._was_frozen:  # by the script, for which a collection would be slow, or copy pages that it shares
            gc.freeze()

    def result(self) -> Behaviour:
        """What was seen; of a window that never began, nothing."""
        return self._result or Behaviour(steps=0, seconds=0.0, notes=("no step was watched",))

    def _hold(self) -> None:
        """Keep models, optimizers and loaders until the result is made: a script may end, or drop them, before."""
        self._held = [*self._subject.modules, *self._subject.optimizers, *self._subject.loaders]

    def _find_schedulers(self) -> None:
        """Those of this moment, held like models; nothing else of torch lists them."""
        from torch.optim.lr_scheduler import LRScheduler

        self._schedulers = _alive(LRScheduler)

    # while it runs

    def _guard(self, call: Callable[[], object]) -> None:
        """Run something of ours: its errors end the watching, and its operations and time are not the script's."""
        mine = threading.get_ident() == self._thread
        if self._fault or not (mine or self._forward.in_autograds_thread()):
            return
        before, self._sampler.own = mine and self._sampler.own, True  # one of autograd's threads may see another's
        self._calls.own = True
        try:
            with without_torch_function():
                call()
        except Exception as error:
            self._fault = _said(error)
        finally:
            self._sampler.own = self._calls.own = before

    def _remember_state(self, subject: Subject) -> None:
        import torch

        self._debug = tuple(_debug_settings())
        self._compiled_before = compilations()
        self._compiling_before = compiling_seconds()
        device = device_name(subject)
        if device != "cpu":
            self._allocations_before = int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))
            torch.cuda.reset_peak_memory_stats(device)  # what earlier phases needed is not needed now

    def _follow_one_step(self) -> None:
        """One step under a dispatch mode that looks at the values; its time counts for nothing."""
        from flatout.script.step_work import follow_step

        if self._finish_work is not None:
            self._work, self._finish_work = self._finish_work(), None
            self._not_counted += time.perf_counter() - self._followed_from
            self._sampler.paused = False
        elif self._steps == FOLLOWED_STEP and current_dispatch_mode() is None and not compile_was_asked_for():
            self._sampler.paused, self._followed_from = True, time.perf_counter()
            self._finish_work = follow_step(counts_flops=False, at_denormals=self._note_denormals)

    def _note_denormals(self, count: int) -> None:
        place = self._places.here()
        if place[1]:  # not so in a backward pass on another thread
            self._denormals[place] += count

    def _backward(self, begins: bool) -> None:
        self._forward.in_backward = begins
        if begins:
            self._forward.interrupted()
            self._guard(self._note_backward)

    def _note_backward(self) -> None:
        for module in self._subject.modules:
            if getattr(module, "require_backward_grad_sync", None):
                self._synchronised[id(module)] = self._synchronised.get(id(module), 0) + 1

    def _note_unused(self) -> None:
        """At the end of a step: which parameters have no gradient may differ from step to step."""
        for module in self._subject.modules:
            if getattr(module, "find_unused_parameters", False):
                unused = (id(one) for one in module.parameters() if one.requires_grad and one.grad is None)
                self._without_gradient.setdefault(id(module), set()).update(unused)

    def _iterator(self, loader: DataLoader[object]) -> None:
        if loader not in self._subject.loaders:
            return
        if loader.num_workers and not loader.persistent_workers:
            self._starts.append((time.perf_counter(), self._steps, self._places.here()))
            self._waiting = self._starts[-1][0], loader
            self._forward.training_began = None

    def _note_first_batch(self) -> None:
        if self._waiting is None:
            return
        began, _ = self._waiting
        at = self._forward.training_began
        if at is not None and at > began:
            self._start_seconds.append(at - began)
            self._waiting = None

    # what was found

    def _made(self) -> Behaviour:
        import torch

        subject, update, forward = self._subject, self._update, self._forward
        device = device_name(subject)
        parameters = [one for optimizer in update.optimizers for one in parameters_of(optimizer)]
        devices, example = _devices(list(subject.modules))
        cuda = torch.cuda if device != "cpu" else None
        accumulated, zeroed = update.accumulated_and_zeroed
        return Behaviour(
            steps=self._steps,
            seconds=self._seconds,
            device=device,
            files=tuple(os.path.realpath(file) for file in own_source_files()),
            forwards=forward.forwards(update.updates, update.learns_through_another),
            backwards=update.backwards(),
            clips=update.clips(),
            schedulers=update.schedulers(_scheduler_warned()),
            idle_schedulers=update.idle_schedulers(self._schedulers),
            remade_optimizers=update.remade_optimizers(),
            optimizer_dtypes=names_of_types(one.dtype for one in parameters),
            untrained_dtypes=names_of_types(one for optimizer in update.optimizers for one in types_lost_by(optimizer)),
            optimizer_lines=update.optimizer_lines,
            outside_optimizer=update.gradients.outside_optimizer(
                self._subject.optimizers, lambda: _alive(torch.optim.Optimizer)
            ),
            devices=devices,
            device_example=example,
            accumulated_steps=accumulated,
            zeroed_steps=zeroed,
            zero_grad_line=self._places.line(update.zero_place) if update.zero_place is not None else None,
            zero_grad_fills=update.zero_fills,
            zero_grad_seconds=update.zero_seconds if device == "cpu" and update.zero_place is not None else None,
            unchanged_share=update.gradients.unchanged_share,
            weights_move=update.gradients.weights_move,
            stops_where_converged=update.stop_themselves,
            made_in_forward=forward.made(),
            kept_steps=self._kept.kept_steps,
            kept_bytes_per_step=self._kept.bytes_per_step,
            live_bytes=tuple(self._kept.live_bytes),
            broadcast_losses=update.broadcast_losses(),
            losses=update.losses(),
            gradients=update.gradients.gradients(),
            batch_shapes=max(1, len(forward.shapes)),
            example_shapes=forward.shapes[:4],
            padding=forward.padding,
            compiled=self._compile_seen(),
            calls=self._calls.found(),
            times=self._sampler.times(self._steps),
            parallel=self._parallel_seen(list(subject.modules)),
            workers=self._workers_seen(),
            channels_last=forward.convolutions.timed(forward.autocast),
            recurrent=forward.recurrent.tried(),
            recomputed_seconds=forward.recomputed_seconds / max(1, self._steps) or None,
            autocast_dtype=forward.autocast,
            scaler=update.scaler,
            anomaly=update.anomaly,
            debug=self._debug,
            seeded=self._seeded or _is_seeded(),
            denormal_share=self._work.denormal_share if self._work is not None else None,
            denormal_slowdown=self._work.denormal_slowdown if self._work is not None else None,
            denormal_lines=tuple(self._places.line(place) for place, _ in self._denormals.most_common(DENORMAL_LINES)),
            allocated_bytes=cuda.max_memory_allocated(device) if cuda is not None else None,
            reserved_bytes=cuda.memory_reserved(device) if cuda is not None else None,
            device_allocations=self._device_allocations(),
            system_seconds=self._system_seconds / max(1, self._steps),
            page_fault_seconds=page_fault_seconds() if device == "cpu" else None,
            notes=(f"the watching ended early: {self._fault}",) if self._fault else (),
        )

    def _device_allocations(self) -> int | None:
        if self._allocations_before is None:
            return None
        import torch

        found = torch.cuda.memory_stats(device_name(self._subject)).get("num_device_alloc", 0)
        return int(found) - self._allocations_before

    def _compile_seen(self) -> CompileSeen | None:
        if not compile_was_asked_for():
            return None
        before, now = self._compiling_before, compiling_seconds()
        return CompileSeen(
            frames=compilations(),
            versions_of_one=compiled_versions(),
            compiled_in_window=compilations() - self._compiled_before,
            seconds_in_window=now - before if now is not None and before is not None else None,
            breaks=tuple(
                GraphBreakSeen(reason=reason, line=self._places.line(place), count=count)
                for (reason, place), count in _by_users_line(self._places).items()
            ),
        )

    def _parallel_seen(self, modules: list[nn.Module]) -> tuple[ParallelSeen, ...]:
        found = []
        for module in modules:
            kind = type(module).__name__
            if kind not in ("DataParallel", "DistributedDataParallel"):
                continue
            synchronised = self._synchronised.get(id(module))
            found.append(
                ParallelSeen(
                    kind=kind,
                    devices=len(getattr(module, "device_ids", None) or ()),
                    find_unused=bool(getattr(module, "find_unused_parameters", False)),
                    unused_parameters=len(self._without_gradient.get(id(module), ())),
                    synchronised_per_step=synchronised / max(1, self._steps) if synchronised is not None else None,
                )
            )
        return tuple(found)

    def _workers_seen(self) -> WorkersSeen | None:
        if len(self._starts) < 2 or not self._start_seconds:
            return None
        epochs = [after[0] - before[0] for before, after in zip(self._starts, self._starts[1:], strict=False)]
        return WorkersSeen(
            line=self._places.line(self._starts[-1][2]),
            workers=max((loader.num_workers for loader in self._subject.loaders), default=0),
            starts=len(self._starts),
            start_seconds=statistics.median(self._start_seconds),
            epoch_seconds=statistics.median(epochs),
        )


def _said(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].name})" if last else ""
    return f"{type(error).__name__}: {error}{where}"


def _debug_settings() -> Iterator[str]:
    """Switches that make each step slower, and are meant to be off."""
    import torch

    environment = variables()
    for name, values in SLOWING_SETTINGS.items():
        if environment.get(name) in values:
            yield f"{name}={environment[name]}"
    if profiler_is_on():
        yield "a profiler of the script records every operation"
    if sys.getprofile() is not None:
        yield "a Python profiler is on (sys.setprofile)"
    if sys.gettrace() is not None:
        yield "a Python tracer is on (sys.settrace)"
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode():
        yield "torch.cuda.set_sync_debug_mode"


def _alive(kind: type[T]) -> list[T]:
    """Every one that Python holds, such as optimizers that step rarely."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _devices(modules: list[nn.Module]) -> tuple[dict[str, int], str]:
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for module in modules:
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            kind = one.device.type
            counts[kind] = counts.get(kind, 0) + one.numel()
            names.setdefault(kind, name)
    rarest = min(counts, key=lambda kind: counts[kind], default="")
    return counts, names.get(rarest, "")


def _scheduler_warned() -> bool:
    """Has torch warned in this process? Python keeps what it has warned of in the module that was named."""
    from torch.optim import lr_scheduler

    modules = [lr_scheduler, *sys.modules.values()]
    for module in modules:
        with suppress(Exception):  # a module may be anything
            registry = vars(module).get("__warningregistry__") or {}
            if any(isinstance(key, tuple) and str(key[0]).startswith(SCHEDULER_WARNING) for key in registry):
                return True
    return False


def _by_users_line(places: Places) -> Counter[tuple[str, tuple[str, int]]]:
    counts: Counter[tuple[str, tuple[str, int]]] = Counter()
    for reason, frames in graph_breaks():
        own = next(((file, line) for file, line in reversed(frames) if places.is_users(file)), None)
        if own is not None:
            counts[reason.strip().partition("\n")[0][:200], own] += 1
    return counts


def _is_seeded() -> bool:
    """Did anybody choose the seed of torch's generator?"""
    import torch

    return torch.initial_seed() < LEAST_SEED and torch.initial_seed() != UNSEEDED
