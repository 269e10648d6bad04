"""Keep activations in the host's memory between forward and backward: less on the GPU, for two trips over its link.

What autograd saves for the backward pass goes to page-locked memory, and comes back when the backward pass asks for it.
Both copies are queued behind the operations that make and need them, so nothing waits on the host; they take the
link's time. Weights stay where they are, and so does what is too small to be worth a copy.

It saves memory, not time, and on a CPU there is nowhere else to go. `flatout tune` tries it only where steps have to
fit (--fit).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from flatout.errors import MachineError
from flatout.levers.lever import COSTS_TIME, Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.torch_private.late import dispatch, tensors

LEAST_BYTES = 64 * 1024
"""A copy of less takes mostly the time to start it."""


class Host:
    """Where tensors wait. `copies`: bytes that went there. A stand-in overrides what touches the devices."""

    def __init__(self) -> None:
        self.moved_bytes = 0

    def takes(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda)

    def out(self, tensor: Any) -> Any:
        """What stands for the tensor until `back`."""
        import torch

        there = torch.empty_like(tensor, device="cpu", pin_memory=True)
        there.copy_(tensor, non_blocking=True)  # in the stream's order: the host does not wait for it
        return there

    def back(self, there: Any, device: Any) -> Any:
        return there.to(device, non_blocking=True)


class PretendedHost(Host):
    """For fake tensors, of whichever device: what left holds nothing, what comes back has its shape."""

    def takes(self, tensor: Any) -> bool:
        return True

    def out(self, tensor: Any) -> Any:
        return tensor.shape, tensor.stride(), tensor.dtype

    def back(self, there: Any, device: Any) -> Any:
        import torch

        shape, stride, dtype = there
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


_host: ContextVar[Host | None] = ContextVar("host", default=None)


@contextlib.contextmanager
def offloading_to(host: Host) -> Iterator[Host]:
    """Have the lever use this host, on any device, for as long as the context lasts."""
    token = _host.set(host)
    try:
        yield host
    finally:
        _host.reset(token)


class ActivationOffload(Lever):
    """Keep activations in host memory between forward and backward (CUDA only).

    They go to page-locked memory and come back when backward needs them; the copies are queued, so the host does
    not wait. It saves memory and takes time, so `flatout tune` tries it only with `--fit`.
    """

    name = "activation offload"
    plan_field = "activation_offload"
    acts_on_forward = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return COSTS_TIME

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("on a CPU the activations are in the host's memory already")
        return offer(True, reason="saves memory, costs the link's time")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        host = _host.get()
        if not value:
            yield
            return
        if host is None:
            if any(not one.is_cuda for module in subject.modules for one in module.parameters()):
                raise MachineError(
                    "the model is on the CPU",
                    limit="its activations are in the host's memory already",
                    remedy="drop activation_offload",
                )
            host = Host()
        with subject.around_calls(_offloaded(host)):
            yield


def _offloaded(host: Host) -> Callable[[Any, Callable[[], Any]], Any]:
    import torch

    def wrapper(module: Any, call: Callable[[], Any]) -> Any:
        if not torch.is_grad_enabled():
            return call()
        away = _Away(host, module)
        with torch.autograd.graph.saved_tensors_hooks(away.pack, away.unpack):
            return call()

    return wrapper


class _Waiting:
    """One tensor that is away, for all operations that saved it."""

    def __init__(self, host: Host, tensor: Any) -> None:
        self._host, self._device, self._there = host, tensor.device, host.out(tensor)
        self._here: weakref.ref[Any] | None = None

    def fetch(self) -> Any:
        here = self._here() if self._here is not None else None
        if here is None:
            here = self._host.back(self._there, self._device)
            self._here = weakref.ref(here)
        return here


class _Away:
    """What one forward pass saved. A tensor that two operations save is copied once."""

    def __init__(self, host: Host, module: Any) -> None:
        self._host = host
        self._staying = {_storage_of(one) for one in (*module.parameters(), *module.buffers())}
        self._known: dict[Any, tuple[weakref.ref[Any], weakref.ref[_Waiting]]] = {}

    def pack(self, tensor: Any) -> Any:
        if not self._goes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        look = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor._version
        key = (tensors().storage_identity(storage), look)
        alive, known = self._known.get(key, (None, None))
        waiting = known() if known is not None and alive is not None and alive() is not None else None
        if waiting is None:
            waiting = _Waiting(self._host, tensor.detach())
            self._host.moved_bytes += tensor.nbytes
            self._known[key] = weakref.ref(storage), weakref.ref(waiting)
        return waiting

    def unpack(self, packed: Any) -> Any:
        return packed.fetch() if isinstance(packed, _Waiting) else packed

    def _goes(self, tensor: Any) -> bool:
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


def _storage_of(tensor: Any) -> int:
    try:
        return int(tensors().storage_identity(tensor.untyped_storage()))
    except (RuntimeError, NotImplementedError):
        return 0
