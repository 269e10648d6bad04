"""A script that trains on the CPU and names no device, on a machine with a GPU: run it there.

Weights are moved in place, so that the optimizer goes on with the very same parameters; its state, buffers and tensors
that modules hold by themselves go along. Each call of the model gets its inputs on the device; the rest of the script
goes on with tensors on either side, which `mixed_devices` brings together where they meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flatout.levers.lever import Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.machine.device import placement


class MovedToDevice(Lever):
    """Run a script that trains on the CPU and names no device on the GPU that is idle beside it.

    Weights are moved in place, so the optimizer keeps the same parameters; its state, buffers and tensors held by
    modules move with them. Each call of the model gets its inputs on the GPU. The rest of the script may hold
    tensors on either side: where they meet, they are brought together. CUDA is not touched unless this lever is on.
    """

    name = "moved to the GPU"
    plan_field = "device"
    switch = "process"
    comes_first = True
    acts_on_forward = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return Saving(expected=0.8, least=-4.0, most=0.99)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not machine.usable_gpus:
            return refuse("no GPU here that torch can use")
        if observed.device != "cpu":
            return refuse("the script trains on the GPU")
        if observed.names_device:
            return refuse("the script chooses its device itself")
        if not observed.modules:
            return refuse("no module was called that could be moved")
        return offer("cuda", reason="the script names no device, and a GPU stands idle")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        from flatout.levers.mixed_devices import MixedDevices

        device = placement(value)

        def tell(why: str) -> None:
            subject.note_incident(self.name, why)

        mode = MixedDevices(device, tell)
        mode.start()
        try:
            with (
                subject.modules.each(lambda module: _move_module(module, device)),
                subject.optimizers.each(lambda optimizer: _move_optimizer(optimizer, device)),
            ):
                yield
        finally:
            mode.stop()

    def takes(self, value: Any) -> bool:
        return bool(value != "cpu")

    def label(self, value: Any) -> str:
        return self.name


def _move_module(module: Any, device: Any) -> Undo[Any]:
    from flatout.levers.mixed_devices import placed

    _place_module(module, device)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        return placed(args, device), placed(kwargs, device)

    hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)

    def undo(module: Any) -> None:
        hook.remove()
        _place_module(module, "cpu")

    return undo


def _place_module(module: Any, device: Any) -> None:
    """Weights, gradients, buffers and tensors that are plain attributes; each remains the object that it was."""
    import torch

    for one in module.modules():
        for tensor in (*one.buffers(recurse=False), *vars(one).values()):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is None:
                _place(tensor, device)
    module.to(device)


def _place(tensor: Any, device: Any) -> None:
    """In place: whoever holds it, holds it there."""
    tensor.data = tensor.data.to(device)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(device)


def _move_optimizer(optimizer: Any, device: Any) -> Undo[Any]:
    _place_optimizer(optimizer, device)
    return lambda optimizer: _place_optimizer(optimizer, "cpu")


def _place_optimizer(optimizer: Any, device: Any) -> None:
    """Its parameters, if no module has taken them along, and its state; step counters stay with the host."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != torch.device(device).type:
                _place(parameter, device)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (name != "step" or value.dim()):
                state[name] = value.to(device)
