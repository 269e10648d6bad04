"""Follow every tensor of a running script for a few steps, then say what held the memory and what leaks.

Installed before the script starts, or in a process that it starts to train in before the first optimizer is made; the
tracker is on as soon as torch was imported. After enough steps the timeline is evaluated; where something leaks, two
more steps run under a trace that finds the line where its holder grows. Then the answer is given.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from flatout.machine.process_memory import peak_resident_bytes, resident_bytes
from flatout.parameters import parameters_of
from flatout.script.communication_calls import ranks_together
from flatout.script.growth_trace import GrowthTrace
from flatout.script.patches import Patches
from flatout.script.rank_answers import RankAnswer, RankAnswers
from flatout.script.trial.isolated_child import ObservedProcess
from flatout.script.trial.messages import MemoryAnswer
from flatout.script.watch import Watch
from flatout.torch_private.compiler import compile_was_asked_for
from flatout.tracebacks import is_users_file

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from flatout.memory.tracking import Tracker
    from flatout.script.memory_inspection import Inspection

WARM_UP_STEPS = 2
TRACED_STEPS = 2


class MemoryWatch:
    """Gives its answer once the steps have been watched."""

    def __init__(self, child: ObservedProcess, *, steps: int, answers: RankAnswers) -> None:
        """answers: where processes that train together leave theirs."""
        self.watch = Watch()
        self._answers, self._together = answers, ranks_together()
        self._child, self._wanted = child, WARM_UP_STEPS + steps
        self._tracker: Tracker  # from when torch is imported
        self._has_torch = False
        self._inspection: Inspection | None = None
        self._trace = GrowthTrace((), is_users_file)
        self._patches = Patches()
        self._marks: list[int] = []
        self._numbers: list[int] = []
        self._resident: list[int] = []
        self._first_event: int | None = None
        self._left_to_trace = 0
        self._depth, self._thread = 0, threading.get_ident()
        self._hooks: list[RemovableHandle] = []
        self._found: MemoryAnswer = {"event": "memory", "ended": False, "peak_resident_bytes": 0}
        self.watch.at_boundary.append(child.guarded(self._boundary))
        self.watch.at_backward.append(lambda roots: self._training_begins())

    def install(self) -> None:
        self._child.on_torch([self._torch_imported])

    def _torch_imported(self, torch: ModuleType) -> None:
        from torch.nn.modules import module as modules

        from flatout.memory.tracking import Tracker
        from flatout.torch_private.loading import BaseIterator

        self._has_torch = True
        self._tracker = Tracker(prefer=self._child.target.folder)
        self._tracker.step = -1  # what is allocated before training belongs to no step
        self._tracker.model = _Models(self.watch)
        self._tracker.__enter__()
        self.watch.install(torch)
        self._hooks += [
            modules.register_module_forward_pre_hook(self._module_starts),
            modules.register_module_forward_hook(self._module_ends, always_call=True),
        ]
        self._patches.replace(BaseIterator, "__next__", self._wrap_next)
        os.register_at_fork(after_in_child=self._release)  # a loader's worker is not watched, nor does it pay for it

    def ended(self) -> MemoryAnswer:
        """The script ended before all steps: what is known by then; little where it never imported torch."""
        if not self._has_torch:
            self._found = {"event": "memory", "ended": True, "peak_resident_bytes": peak_resident_bytes()}
            return self._found
        self._trace.stop()
        self._found = self._result(self._inspection or self._inspect(None), ended=True)
        return self._found

    def rank_answer(self, fault: str = "") -> RankAnswer:
        """The same, of a process among others that train."""
        rank, ranks = self._together or (None, None)
        found = self._found
        return {
            "name": self._answers.name,
            "rank": rank,
            "ranks": ranks,
            "ended": found["ended"],
            "memory": {**found, "peak_resident_bytes": found["peak_resident_bytes"] or peak_resident_bytes()},
            "fault": fault,
        }

    def stop(self) -> None:
        """Leave the script alone."""
        self._trace.stop()
        if self._has_torch:
            self._release()
        self.watch.uninstall()

    def _release(self) -> None:
        self._tracker.__exit__(None, None, None)
        self._patches.undo()
        self._patches = Patches()  # a reference to a method of the watch would let that stay
        for hook in self._hooks:
            hook.remove()

    # what the script does

    def _boundary(self) -> None:
        if self.watch.finder.kind is None:
            return
        frame = sys._getframe(2)
        self._together = self._together or ranks_together()  # known by now, and no more when the process ends
        if self._left_to_trace:
            self._left_to_trace -= 1
            if not self._left_to_trace and self._inspection is not None:
                self._finish(self._inspection)
            return
        from flatout.memory.graphs import newest_number

        self._training_begins()
        self._name_optimizers()
        self._marks.append(self._tracker.events)
        self._numbers.append(newest_number())
        self._resident.append(resident_bytes())
        self._tracker.step = len(self._marks)
        if len(self._marks) == self._wanted:
            self._inspection = inspection = self._inspect(frame)
            self._trace = GrowthTrace(inspection.sizes(), is_users_file)
            if not inspection.suspects:
                self._finish(inspection)
            else:
                self._left_to_trace = TRACED_STEPS
                self._trace.start(frame)

    def _finish(self, inspection: Inspection) -> None:
        self._trace.stop()
        self._found = self._result(inspection, ended=False)
        self._child.finish(self._found)

    def _training_begins(self) -> None:
        if self._first_event is None and self.watch.enabled:
            self._first_event = self._tracker.events
            self._tracker.step = 0

    def _module_starts(self, module: nn.Module, arguments: object) -> None:
        import torch

        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth > 1:
            return
        trains = torch.is_grad_enabled()
        if trains:
            self._training_begins()
        self._tracker.hold(module.parameters(), "weights")  # also of a teacher or a target network, which do not train
        self._tracker.hold(module.buffers(), "weights")
        if trains:
            self._name_inputs(arguments)

    def _module_ends(self, module: nn.Module, arguments: object, output: object) -> None:
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)

    def _wrap_next(self, original: Callable[[Iterator[object]], object]) -> Callable[[Iterator[object]], object]:
        def __next__(iterator: Iterator[object]) -> object:
            batch = original(iterator)
            self._name_inputs(batch)
            return batch

        return __next__

    def _name_inputs(self, values: object) -> None:
        """Tensors without a history: a hidden state that is passed back in belongs to the model."""
        from torch import Tensor

        from flatout.memory.tracking import identity
        from flatout.torch_private.dispatch import tree_leaves

        known = self._tracker.alive_by_storage()
        for one in tree_leaves(values):
            if isinstance(one, Tensor) and one.grad_fn is None and not one.requires_grad:
                allocation = known.get(identity(one))
                if allocation is None or allocation.category == "temporaries":
                    self._tracker.hold([one], "inputs")

    def _name_optimizers(self) -> None:
        for optimizer in self.watch.subject.optimizers:
            parameters = parameters_of(optimizer)
            self._tracker.hold(parameters, "weights")
            self._tracker.name([one.grad for one in parameters if one.grad is not None], "gradients")

    # what is found

    def _inspect(self, frame: FrameType | None) -> Inspection:
        from flatout.script.memory_inspection import Inspection

        per_step = self.watch.backwards / max(1, self.watch.steps)
        return Inspection(
            tracker=self._tracker,
            marks=self._marks,
            numbers=self._numbers,
            first_event=self._first_event if self._first_event is not None else self._tracker.events,
            warm_up=WARM_UP_STEPS,
            # a scaler unscales all gradients first, and ranks add them up: they cannot be freed one by one
            one_backward_a_step=0.9 < per_step < 1.1 and not self.watch.saw_scaler and self._together is None,
            frame=frame,
            folder=self._child.target.folder,
        )

    def _result(self, inspection: Inspection, *, ended: bool) -> MemoryAnswer:
        traced = self._trace.line_of if self._inspection is not None else lambda index: None
        steps_traced = TRACED_STEPS - self._left_to_trace if self._inspection is not None else 0
        return {
            "event": "memory",
            "step_kind": self.watch.finder.kind,
            "steps": len(self._marks),
            "ended": ended,
            "compiled": self.watch.saw_compile,
            "left_uncompiled": compile_was_asked_for() and not self.watch.saw_compile,
            "resident_bytes": self._resident,
            "peak_resident_bytes": peak_resident_bytes(),
            **inspection.result(traced, steps_traced),
        }


class _Models:
    """All models that the script trains, in the form the tracker needs."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for module in self._watch.subject.modules for parameter in module.parameters())
