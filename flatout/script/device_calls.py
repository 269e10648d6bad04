"""Time that the script's own thread spends copying to a device and waiting for it.

Only where the weights are on a device, and only in a window: `.to` and `.cuda` from the host count as transfer;
whatever reads a value (`.item`, `.tolist`, `.cpu`, `bool(tensor)`, `torch.cuda.synchronize`) as sync.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.levers.subject import Subject
from flatout.machine.device import CpuDevice, CudaDevice, Device, device_index
from flatout.parallel.whole_tensors import home_of
from flatout.parameters import parameters_of
from flatout.script.patches import Patches, around
from flatout.script.spans import Span

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ASKING = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")
MOVING = ("to", "cuda")


class DeviceCalls:
    """Patches on methods of torch.Tensor between `install` and `uninstall`.

    `enter(kind)` opens a span or returns None outside of windows; `leave(span)` closes it.
    """

    def __init__(self, enter: Callable[[str], Span | None], leave: Callable[[Span], None]) -> None:
        self._enter, self._leave = enter, leave
        self._patches = Patches()

    def install(self, torch: ModuleType) -> None:
        if len(self._patches):
            self._patches.redo()
            return
        asking = around(lambda *_, **__: self._enter("sync"), lambda span, _: self._leave(span))
        for name in ASKING:
            self._patches.replace(torch.Tensor, name, asking)
        for name in MOVING:
            self._patches.replace(torch.Tensor, name, around(self._moves, self._moved))
        if torch.cuda.is_available():
            self._patches.replace(torch.cuda, "synchronize", asking)

    def uninstall(self) -> None:
        self._patches.undo()

    def _moves(self, tensor: Tensor, *_: object, **__: object) -> tuple[Span, torch.device] | None:
        span = self._enter("other")
        return None if span is None else (span, tensor.device)

    def _moved(self, begun: tuple[Span, torch.device], result: Tensor | None) -> None:
        span, device = begun
        if result is not None and result.device != device:
            span.kind = "sync" if result.device.type == "cpu" else "transfer"
        self._leave(span)


def device_name(subject: Subject) -> str:
    """'cpu' or 'cuda:0': where the weights are, or were before the script dropped them."""
    from flatout.torch_private.dispatch import without_torch_function

    with without_torch_function():  # the script's own modes must not see our operations
        of_modules = (one for module in subject.modules for one in module.parameters())
        of_optimizers = (one for optimizer in subject.optimizers for one in parameters_of(optimizer))
        for parameter in itertools.chain(of_modules, of_optimizers):
            subject.last_device = str(home_of(parameter))
            break
    return subject.last_device or "cpu"


def device_of(subject: Subject) -> Device:
    import torch

    name = device_name(subject)
    return CudaDevice(device_index(torch.device(name))) if name.startswith("cuda") else CpuDevice()
