"""Processes that prepare batches while the model trains."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flatout.levers.batched_fetch import data_too_small
from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class LoaderWorkers(Lever):
    """Sets workers, kept alive between epochs, on loaders that have none. Sees only cores that may be used."""

    name = "loader workers"
    plan_field = "loader_workers"
    exactness = "bit-same"
    switch = "loader"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.loaders:
            return refuse("no DataLoader feeds training")
        if all(loader.workers for loader in observed.loaders):
            return refuse("the script sets them itself")
        too_little = data_too_small(observed)
        if too_little:
            return refuse(too_little)
        if any(loader.draws_random_numbers for loader in observed.loaders):
            return refuse("its samples draw random numbers, which workers would draw differently")
        if all(loader.draws_random_numbers is None for loader in observed.loaders):
            return refuse("whether its samples draw random numbers is unknown")
        cores = machine.cpu.available_cores
        values = sorted({1, min(2, cores), min(4, cores), max(1, cores - 1)})
        return offer(*values, reason=f"{cores} cores may be used")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        def before_iterator(loader: Any) -> None:
            if loader.num_workers == 0 and loader.batch_sampler is not None:
                loader.num_workers = value
                loader.prefetch_factor = 2
                object.__setattr__(loader, "persistent_workers", True)  # DataLoader guards this one after it was built

        return subject.before_iterators(before_iterator)

    def label(self, value: Any) -> str:
        return f"{value} loader worker{'s' if value != 1 else ''}"


class PinnedMemory(Lever):
    """Page-locked batches, which the GPU copies while it computes."""

    name = "pinned memory"
    plan_field = "pin_memory"
    exactness = "bit-same"
    switch = "loader"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("the script trains on the CPU")
        if not observed.loaders or all(loader.pin_memory for loader in observed.loaders):
            return refuse("no loader without it feeds training")
        return offer(True, reason="batches are copied to the GPU every step")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        def before_iterator(loader: Any) -> None:
            loader.pin_memory = True

        return subject.before_iterators(before_iterator)
