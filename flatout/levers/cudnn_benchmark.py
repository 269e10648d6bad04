"""Let cuDNN time its convolution algorithms once per shape.

torch keeps the algorithm of each shape from its first convolution on, whether it was timed or chosen by a heuristic:
turned on later, the setting changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine


class CudnnBenchmark(Lever):
    """Let cuDNN time its convolution algorithms once per input shape and keep the fastest."""

    name = "cudnn.benchmark"
    plan_field = "cudnn_benchmark"
    switch = "process"
    of_process = True
    cheap_to_switch = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return Saving(expected=0.1 * observed.busy_share, least=-0.02, most=0.5 * observed.busy_share)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("the model is on the CPU")
        if observed.cudnn_benchmark:
            return refuse("it is already turned on")
        if observed.deterministic_algorithms:
            return refuse("deterministic algorithms are required")
        if not any(module.convolutions for module in observed.modules):
            return refuse("the model has no convolutions")
        return offer(True, reason="the model has convolutions")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch

        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = bool(value)
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def takes(self, value: Value) -> bool:
        return True  # False turns it off
