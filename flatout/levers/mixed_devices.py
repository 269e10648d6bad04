"""A script that was written for the CPU alone, with its model on a device: what mixes both is fixed, call by call.

A mode of torch that stands around every call from the script's thread. A call goes through as it is; where it fails
and its tensors lie on both sides, they are brought together and it is tried again:

    output - targets                  # targets of a loader: to the device
    total.add_(loss)                  # a tensor of the script's on the CPU that is changed in place: to the CPU
    output.numpy(), torch.save(...)   # the host's by nature: to the CPU
    an operation the device lacks     # on the CPU, which is told

Copies are differentiable, so gradients cross over too. What fails on the CPU as well is the script's own mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatout.replaced import replaced
from flatout.torch_private.attributes import PICKLED
from flatout.torch_private.dispatch import current_function_mode, tree_leaves, tree_map_only

TO_THE_HOST = frozenset((Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))
"""What only makes sense of host memory."""
LOSSES = frozenset(
    getattr(functional, name) for name in dir(functional) if name.endswith("_loss") or "cross_entropy" in name
)
"""They meet a loader's targets every step: these are moved before, not after a failure."""

WRITING_ASIDE = frozenset(
    getattr(functional, name) for name in ("batch_norm", "instance_norm", "embedding", "embedding_bag")
) | {torch.batch_norm, torch.instance_norm}
"""They may change arguments other than the first (running statistics, rows too long), which must not be copies."""


class MixedDevices(TorchFunctionMode):
    """Active between `start` and `stop`; `tell` hears of operations that had to run on the CPU."""

    def __init__(self, device: torch.device, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.device, self.kind, self._tell = device, device.type, tell
        self._on = False
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        self._on = True
        self._undo.enter_context(replaced(Tensor, PICKLED, self._pickling_as_the_cpus))
        self.__enter__()

    def stop(self) -> None:
        """Under a mode that the script has entered since, it stays where it is and lets everything pass."""
        self._on = False
        self._undo.close()
        if current_function_mode() is self:
            self.__exit__(None, None, None)

    def _pickling_as_the_cpus(self, pickled: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Any]:
        """Where `torch.save` and `pickle` take a tensor apart, past all modes: a saved one is the CPU's, as the script
        would have saved it."""
        kind = self.kind

        def as_the_cpus(tensor: Tensor, protocol: Any) -> Any:
            return pickled(tensor.cpu() if tensor.device.type == kind else tensor, protocol)

        return as_the_cpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in TO_THE_HOST:
            args = (placed(args[0], "cpu"), *args[1:])
        elif func in LOSSES and self._kinds(args, kwargs) == {"cpu", self.kind}:
            args, kwargs = placed((args, kwargs), self.device)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            kinds = self._kinds(args, kwargs)
            if self.kind not in kinds:
                raise
            failed = error
        return self._together(func, args, kwargs, failed, mixed="cpu" in kinds)

    def _together(self, func: Any, args: Any, kwargs: Any, failed: Exception, *, mixed: bool) -> Any:
        if func in WRITING_ASIDE:
            return _call(func, ((placed(args[0], self.device), *args[1:]), kwargs))
        changed = _changed_in_place(func, args, kwargs)
        if mixed:
            target: Any = changed.device if changed is not None else self.device
            try:
                return _call(func, placed((args, kwargs), target, but=changed))
            except Exception as error:
                failed = error
        if changed is not None:
            raise failed
        result = _call(func, placed((args, kwargs), "cpu"))
        self._tell(
            f"{getattr(func, '__name__', func)} runs on the CPU: {str(failed).strip().partition(chr(10))[0][:150]}"
        )
        return result

    def _kinds(self, args: Any, kwargs: Any) -> set[str]:
        return {one.device.type for one in _tensors((args, kwargs))}


def _call(func: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    return func(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, Tensor))


def placed(values: Any, target: Any, but: Tensor | None = None) -> Any:
    """The same with its tensors on `target`; those that are there already stay the objects that they are."""
    kind = torch.device(target).type
    return tree_map_only(Tensor, lambda one: one if one is but or one.device.type == kind else one.to(target), values)


def _changed_in_place(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call writes to."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    name = getattr(func, "__name__", "")
    own = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    writes = own or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return args[0] if writes and args and isinstance(args[0], Tensor) else None
