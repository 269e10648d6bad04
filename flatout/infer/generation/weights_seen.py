"""Detects changes of a model since it was prepared; cheap enough to run before every text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from flatout.infer.generation.families import HOOKS
from flatout.infer.left_unchanged import version_of


def settings_of(model: nn.Module) -> tuple[object, ...]:
    """Every module with its class, hooks and plain attributes, to detect a change of any of them."""
    return tuple(_settings(module) for module in model.modules())


def _settings(module: nn.Module) -> tuple[object, ...]:
    held = vars(module)
    plain = [(name, value) for name, value in held.items() if type(value) in _SCALARS and name != "training"]
    return (id(module), type(module), "forward" in held, *(len(held[hooks]) for hooks in HOOKS), *plain)


_SCALARS = frozenset({int, float, bool, str, type(None)})


class WeightsSeen:
    """A model's tensors and settings at one moment, and whether they are still the same.

    Noticed are: other tensors or modules (`load_state_dict(assign=True)`, a layer replaced), tensors moved or given
    other memory (`.to()`, `.data = `), anything that autograd counts (optimizer steps, `copy_`, `load_state_dict`),
    and writing past its counter (`.data.mul_()`, a numpy view) that changes a whole tensor, row or column: a value out
    of each row is compared too. A single value written past the counter may go unnoticed; so may all that is written
    past it to a sparse tensor, or to one of a class of its own.

    buffers: False for a model that is run by its own forward pass, which may write to them.
    """

    def __init__(self, model: nn.Module, *, buffers: bool = True) -> None:
        self._buffers = buffers
        self._tensors = list(_tensors(model, buffers))
        self._versions = [version_of(one) for one in self._tensors]
        self._places = [_place(one) for one in self._tensors]
        self._settings = settings_of(model)
        self._samples = _samples(self._tensors)

    def written(self) -> bool:
        """Whether a tensor was written to, as autograd counts it: for between two passes, in some microseconds."""
        return [version_of(one) for one in self._tensors] != self._versions

    def changed(self, model: nn.Module) -> bool:
        """Whether the model is another one than at that moment."""
        now = list(_tensors(model, self._buffers))
        if len(now) != len(self._tensors) or any(a is not b for a, b in zip(now, self._tensors, strict=True)):
            return True
        if self.written() or [_place(one) for one in now] != self._places or settings_of(model) != self._settings:
            return True
        found = _samples(now)
        return any(not torch.equal(found[kind], sample) for kind, sample in self._samples.items())


def _tensors(model: nn.Module, buffers: bool) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers() if buffers else ()


def _is_plain(tensor: Tensor) -> bool:
    """Values in memory of its own: not a sparse tensor, nor a class of tensors that holds others."""
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def _place(tensor: Tensor) -> tuple[object, ...]:
    if not _is_plain(tensor):
        return (tensor.dtype, tensor.shape)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _samples(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """About one value of each row, of other columns from row to row, as whole numbers: NaN equals itself then."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in filter(_is_plain, tensors):
        held = tensor.detach()
        flat = held.view(-1) if held.is_contiguous() else held.flatten()
        stride = max(1, held.shape[-1] - 1) if held.dim() > 1 else 1
        by_kind.setdefault((held.device, held.dtype), []).append(flat[::stride])
    return {kind: torch.cat(parts).view(_BITS.get(kind[1].itemsize, torch.uint8)) for kind, parts in by_kind.items()}


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
