"""Autocast: the model's products in bf16 or fp16, its weights, loss and optimizer in fp32.

Activations that the model keeps, or that a hook receives, are in the dtype of the region; numpy, which has no bf16,
gets them in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.autocast import (
    autocast_call,
    copies_in_autocast_of_caller,
    loss_scaled_backward,
    not_in_fp32,
)
from flatout.precision.recurrent import lstm_gradients_right
from flatout.replaced import replaced

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor
    from torch.nn import Module

CAST_SECONDS = 10e-6
"""The most that casting the inputs and results of one operation takes, where these are small."""


class Autocast(Lever):
    """Matrix products in bf16, or in fp16 with loss scaling where the device has no fast bf16.

    Autocast is put around each outermost module call that trains. Weights, loss and optimizer stay in fp32, and the
    model's outputs are fp32 again, so the script's loss, metrics and `.numpy()` see what they always saw. On a CPU, an
    LSTM runs in fp32 where its gradients would be wrong.
    """

    name = "autocast"
    plan_field = "precision"
    acts_on_forward = True
    halves_activations = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        saved = observed.saved_by_dtype(machine, "bf16")
        casts = observed.share_of_operations(CAST_SECONDS)
        most = max(saved, 0.9 * observed.busy_share)
        return Saving(expected=0.7 * saved - 0.2 * casts, least=-0.15 - casts, most=most)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.autocast_in_script:
            return refuse("autocast is already used")
        if not observed.modules:
            return refuse("no module was called: autocast needs one to wrap")
        if any(set(module.dtypes) - {"float32"} for module in observed.modules):
            return refuse("the model's weights are not fp32")
        place = machine.gpu(observed.device) if observed.device.startswith("cuda") else machine.cpu
        fast = place.fast_dtypes if place is not None else ()
        if "bf16" in fast:
            return offer("bf16", reason="this device has bf16 instructions")
        if "fp16" in fast and not observed.scaler_in_script and observed.optimizers:
            return offer("fp16", reason="this device has fp16 but no bf16 instructions")
        return refuse("this device has no fast 16-bit format")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch

        with contextlib.ExitStack() as stack:
            stack.enter_context(subject.around_calls(autocast_call(str(value))))
            stack.enter_context(lstm_gradients_right())
            stack.enter_context(replaced(torch.Tensor, "numpy", _numpy_of_fp32))
            stack.enter_context(replaced(torch.nn.DataParallel, "parallel_apply", copies_in_autocast_of_caller))
            if value == "fp16":
                stack.enter_context(subject.around_backward(loss_scaled_backward(subject.optimizers, subject.modules)))
            yield

    def nothing_in(self, model: Module, value: Value) -> str:
        return not_in_fp32(model)

    def takes(self, value: Value) -> bool:
        return value != "fp32"

    def label(self, value: Value) -> str:
        return f"{value} autocast"


def _numpy_of_fp32(original: Callable[..., ndarray]) -> Callable[..., ndarray]:
    import torch

    def numpy(tensor: Tensor, *args: object, **kwargs: object) -> ndarray:
        readable = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        return original(readable, *args, **kwargs)

    return numpy
