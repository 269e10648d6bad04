"""A script written for the CPU, with its model on a GPU: calls that mix devices are fixed one by one.

A torch function mode around every call from the script's thread. Calls run unchanged; one that fails with tensors on
both devices is retried with its tensors moved to one of them:

    output - targets                  # targets of a loader: to the GPU
    total.add_(loss)                  # a CPU tensor that is changed in place: to the CPU
    output.numpy(), torch.save(...)   # needs host memory: to the CPU
    an operation the GPU lacks        # runs on the CPU, and is reported

Copies are differentiable, so gradients cross devices too. A call that also fails on the CPU is the script's own error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatout.replaced import replaced
from flatout.torch_private.attributes import PICKLED
from flatout.torch_private.dispatch import current_function_mode, tree_leaves, tree_map_only

Function = Callable[..., object]
"""One of torch's."""
Arguments = tuple[object, ...]
Keywords = dict[str, object]
T = TypeVar("T")

TO_THE_HOST: frozenset[Function] = frozenset((Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))
"""These need host memory."""
LOSSES: frozenset[Function] = frozenset(
    getattr(functional, name) for name in dir(functional) if name.endswith("_loss") or "cross_entropy" in name
)
"""They get a loader's targets in every step: these are moved up front, not after a failure."""

WRITING_ASIDE: frozenset[Function] = frozenset(
    getattr(functional, name) for name in ("batch_norm", "instance_norm", "embedding", "embedding_bag")
) | {torch.batch_norm, torch.instance_norm}
"""They may modify arguments other than the first (running statistics, renormalized rows), which must not be copies."""


class MixedDevices(TorchFunctionMode):
    """Active between `start` and `stop`; `report` is called with operations that had to run on the CPU."""

    def __init__(self, device: torch.device, report: Callable[[str], None]) -> None:
        super().__init__()
        self.device, self.kind, self._report = device, device.type, report
        self._on = False
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        self._on = True
        self._undo.enter_context(replaced(Tensor, PICKLED, self._pickling_on_the_cpu))
        TorchFunctionMode.__enter__(self)

    def stop(self) -> None:
        """Where the script has entered another mode since, this one stays on the stack and does nothing."""
        self._on = False
        self._undo.close()
        if current_function_mode() is self:
            TorchFunctionMode.__exit__(self, None, None, None)

    def _pickling_on_the_cpu(self, pickled: Callable[[Tensor, int], object]) -> Callable[[Tensor, int], object]:
        """`torch.save` and `pickle` reduce tensors without going through modes: a GPU tensor is saved as a CPU tensor,
        as the script would have saved it."""
        kind = self.kind

        def on_the_cpu(tensor: Tensor, protocol: int) -> object:
            return pickled(tensor.cpu() if tensor.device.type == kind else tensor, protocol)

        return on_the_cpu

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not self._on or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in TO_THE_HOST:
            args = (placed(args[0], "cpu"), *args[1:])
        elif func in LOSSES and _kinds(args, kwargs) == {"cpu", self.kind}:
            args, kwargs = placed((args, kwargs), self.device)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            kinds = _kinds(args, kwargs)
            if self.kind not in kinds:
                raise
            failed = error
        return self._together(func, args, kwargs, failed, mixed="cpu" in kinds)

    def _together(self, func: Function, args: Arguments, kwargs: Keywords, failed: Exception, *, mixed: bool) -> object:
        if func in WRITING_ASIDE:
            return _call(func, ((placed(args[0], self.device), *args[1:]), kwargs))
        changed = _changed_in_place(func, args, kwargs)
        if mixed:
            target = changed.device if changed is not None else self.device
            try:
                return _call(func, placed((args, kwargs), target, but=changed))
            except Exception as error:
                failed = error
        if changed is not None:
            raise failed
        result = _call(func, placed((args, kwargs), "cpu"))
        self._report(
            f"{getattr(func, '__name__', func)} runs on the CPU: {str(failed).strip().partition(chr(10))[0][:150]}"
        )
        return result


def _call(func: Function, arguments: tuple[Arguments, Keywords]) -> object:
    args, kwargs = arguments
    return func(*args, **kwargs)


def _kinds(args: Arguments, kwargs: Keywords) -> set[str]:
    """The kinds of devices on which there are tensors."""
    return {one.device.type for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}


def placed(values: T, target: torch.device | str, but: Tensor | None = None) -> T:
    """The same with its tensors on `target`; tensors already there are not copied, nor is `but`."""
    kind = torch.device(target).type
    moved: T = tree_map_only(
        Tensor, lambda one: one if one is but or one.device.type == kind else one.to(target), values
    )
    return moved


def _changed_in_place(func: Function, args: Arguments, kwargs: Keywords) -> Tensor | None:
    """The tensor that a call writes to."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    name = getattr(func, "__name__", "")
    own = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    writes = own or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return args[0] if writes and args and isinstance(args[0], Tensor) else None
