"""Keep activations in host memory between forward and backward: less GPU memory for two copies over PCIe.

Weights stay on the GPU, and so do tensors too small to be worth a copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar  # Any: each host's own form of a tensor

from flatout.errors import MachineError
from flatout.levers.lever import COSTS_TIME, Lever, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Wrapper
from flatout.machine.description import Machine
from flatout.torch_private.late import dispatch, tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST_BYTES = 64 * 1024
"""Smaller copies take mostly launch overhead."""


class Host:
    """The host's page-locked memory, where tensors wait for the backward pass. Tests override what touches devices."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        """What was copied there so far."""

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def out(self, tensor: Tensor) -> object:  # in a form of each host's own
        """What represents the tensor until `back`."""
        import torch

        there = torch.empty_like(tensor, device="cpu", pin_memory=True)
        there.copy_(tensor, non_blocking=True)  # in stream order: the host does not wait for it
        return there

    def back(self, there: Any, device: torch.device) -> Tensor:
        moved: Tensor = there.to(device, non_blocking=True)
        return moved


class PretendedHost(Host):
    """For fake tensors on any device: keeps shape, strides and dtype, and no memory."""

    def takes(self, tensor: Tensor) -> bool:
        return True

    def out(self, tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
        return tensor.shape, tensor.stride(), tensor.dtype

    def back(self, there: Any, device: torch.device) -> Tensor:
        import torch

        shape, stride, dtype = there
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


_host: ContextVar[Host | None] = ContextVar("host", default=None)
H = TypeVar("H", bound=Host)


@contextlib.contextmanager
def offloading_to(host: H) -> Iterator[H]:
    """Have the lever use this host, on any device, until the context ends."""
    token = _host.set(host)
    try:
        yield host
    finally:
        _host.reset(token)


class ActivationOffload(Lever):
    """Keep activations in host memory between forward and backward (CUDA only).

    They are copied to page-locked memory and back when backward needs them; the copies are queued, so the host does
    not wait. It saves memory and takes time, so `flatout tune` tries it only with `--fit`.
    """

    name = "activation offload"
    plan_field = "activation_offload"
    usual_saving = COSTS_TIME
    acts_on_forward = True

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("on a CPU the activations are in host memory already")
        return offer(True, reason="saves memory, costs the time of the copies")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        host = _host.get()
        if host is None:
            if any(not one.is_cuda for module in subject.modules for one in module.parameters()):
                raise MachineError(
                    "the model is on the CPU",
                    limit="its activations are in host memory already",
                    remedy="drop activation_offload",
                )
            host = Host()
        with subject.around_calls(_offloaded(host)):
            yield


def _offloaded(host: Host) -> Wrapper:
    import torch

    def wrapper(module: torch.nn.Module, call: Callable[[], object]) -> object:
        if not torch.is_grad_enabled():
            return call()
        saved = _Offloaded(host, module)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            return call()

    return wrapper


class _OffloadedTensor:
    """One offloaded tensor, shared by all operations that saved it."""

    def __init__(self, host: Host, tensor: Tensor) -> None:
        self._host, self._device, self._there = host, tensor.device, host.out(tensor)
        self._here: weakref.ref[Tensor] | None = None

    def fetch(self) -> Tensor:
        here = self._here() if self._here is not None else None
        if here is None:
            here = self._host.back(self._there, self._device)
            self._here = weakref.ref(here)
        return here


class _Offloaded:
    """What one forward pass saved. A tensor that two operations save is copied once."""

    def __init__(self, host: Host, module: torch.nn.Module) -> None:
        self._host = host
        self._staying = {_storage_of(one) for one in (*module.parameters(), *module.buffers())}
        self._known: dict[object, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_OffloadedTensor]]] = {}
        """By storage and view."""

    def pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        if not self._goes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        look = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor._version
        key = (tensors().storage_identity(storage), look)
        alive, known = self._known.get(key, (None, None))
        waiting = known() if known is not None and alive is not None and alive() is not None else None
        if waiting is None:
            waiting = _OffloadedTensor(self._host, tensor.detach())
            self._host.moved_bytes += tensor.nbytes
            self._known[key] = weakref.ref(storage), weakref.ref(waiting)
        return waiting

    def unpack(self, packed: Tensor | _OffloadedTensor) -> Tensor:
        return packed.fetch() if isinstance(packed, _OffloadedTensor) else packed

    def _goes(self, tensor: Tensor) -> bool:
        import torch

        if (
            tensor.layout != torch.strided
            or dispatch().is_traceable_wrapper_subclass(tensor)
            or tensor.nbytes < LEAST_BYTES
        ):
            return False
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # expanded: a copy would be larger than what it frees
            return False
        return self._host.takes(tensor) and _storage_of(tensor) not in self._staying


def _storage_of(tensor: Tensor) -> int:
    try:
        return int(tensors().storage_identity(tensor.untyped_storage()))
    except (RuntimeError, NotImplementedError):
        return 0
