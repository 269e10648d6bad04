"""What a case really holds: the peak of torch's own CPU allocator, as its profiler reports every event of it.

Independent of Flatout's tracker: nothing is intercepted, and memory that kernels take and give back is seen too.
"""

from __future__ import annotations

import gc

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.memory.cases import Case
from flatout import TrainStep

STEPS = 2
_MARK = "benchmark: steps"


def measured_peak_bytes(case: Case, batch_size: int) -> int:
    """The most that was held during two steps, of all that was taken since before the model was made."""
    if case.plan().compile is not None:
        _compile_first(case, batch_size)
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = case.subject.make()
        optimizer = case.optimizer_of(model)
        batch = case.subject.batch(batch_size)
        step = TrainStep(model, optimizer, case.subject.loss_fn, case.plan())
        with record_function(_MARK):
            for _ in range(STEPS):
                step(batch)
    events = profiler.profiler.kineto_results.events()
    began = next(event.start_ns() for event in events if event.name() == _MARK)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for when, size in changes:
        held += size
        if when >= began:
            peak = max(peak, held)
    return peak


def _compile_first(case: Case, batch_size: int) -> None:
    """Compiling takes memory of its own, once; what is measured is what the compiled code takes."""
    model = case.subject.make()
    step = TrainStep(model, case.optimizer_of(model), case.subject.loss_fn, case.plan())
    for _ in range(STEPS):
        step(case.subject.batch(batch_size))
    step.close()
    del model, step
    gc.collect()
