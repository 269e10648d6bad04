"""Run a script that trains on the CPU and names no device on the GPU of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.machine.device import placement
from flatout.parameters import parameters_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


class MovedToDevice(Lever):
    """Run a script that trains on the CPU and names no device on an idle GPU.

    Weights are moved in place, so the optimizer keeps the same parameters; its state, buffers and tensors held by
    modules move with them. Each call of the model gets its inputs on the GPU. The rest of the script may hold
    tensors on either device: operations that mix both move them. CUDA is not touched unless this lever is on.
    """

    name = "moved to the GPU"
    plan_field = "device"
    names_value = False
    usual_saving = Saving(expected=0.8, least=-4.0, most=0.99)
    switch = "process"
    comes_first = True
    acts_on_forward = True

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not machine.usable_gpus:
            return refuse("this machine has no GPU that torch can use")
        if observed.device != "cpu":
            return refuse("the script trains on the GPU")
        if observed.names_device:
            return refuse("the script chooses its device itself")
        if not observed.modules:
            return refuse("no module was called that could be moved")
        return offer("cuda", reason="the script names no device, and a GPU is idle")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        from flatout.levers.mixed_devices import MixedDevices

        device = placement(str(value))
        mode = MixedDevices(device, subject.reporter(self.name))
        mode.start()
        try:
            with (
                subject.modules.each(lambda module: _move_module(module, device)),
                subject.optimizers.each(lambda optimizer: _move_optimizer(optimizer, device)),
            ):
                yield
        finally:
            mode.stop()

    def takes(self, value: Value) -> bool:
        return value != "cpu"


def _move_module(module: Module, device: torch.device) -> Undo[Module]:
    from flatout.levers.mixed_devices import placed

    _place_module(module, device)

    def before(
        module: Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return placed(args, device), placed(kwargs, device)

    hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)

    def undo(module: Module) -> None:
        hook.remove()
        _place_module(module, "cpu")

    return undo


def _place_module(module: Module, device: torch.device | str) -> None:
    """Move weights, gradients, buffers and tensors that are plain attributes; each remains the same object."""
    import torch

    for one in module.modules():
        for tensor in (*one.buffers(recurse=False), *vars(one).values()):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is None:
                _place(tensor, device)
    module.to(device)


def _place(tensor: Tensor, device: torch.device | str) -> None:
    """In place, so that every reference to it sees the move."""
    tensor.data = tensor.data.to(device)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(device)


def _move_optimizer(optimizer: Optimizer, device: torch.device) -> Undo[Optimizer]:
    _place_optimizer(optimizer, device)
    return lambda optimizer: _place_optimizer(optimizer, "cpu")


def _place_optimizer(optimizer: Optimizer, device: torch.device | str) -> None:
    """Move its parameters, if no module has moved them already, and its state; step counters stay on the CPU."""
    import torch

    from flatout.levers.mixed_devices import placed

    for parameter in parameters_of(optimizer):
        if parameter.device.type != torch.device(device).type:
            _place(parameter, device)
    for key, state in optimizer.state.items():
        if not isinstance(state, dict):  # an optimizer of the script may keep a tensor
            optimizer.state[key] = placed(state, device)
            continue
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (name != "step" or value.dim()):
                state[name] = value.to(device)
