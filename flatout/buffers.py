"""The buffers of a model: which of them a computation changes, and putting them back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Key: TypeAlias = tuple[int, str]
"""A layer by its identity, as a script's module may compare in any way, and the name of its buffer."""


def buffers_of(model: Module) -> list[tuple[Module, str]]:
    """The layers that have some, with the name of each; a tensor with several names under all of them."""
    return [(layer, name) for layer in model.modules() for name, one in layer._buffers.items() if one is not None]


def found_buffers(buffers: Iterable[tuple[Module, str]], copied: Collection[Key] | None = None) -> list[FoundBuffer]:
    """These buffers as they are now. copied: those of which to keep the values; None: all."""
    found = []
    for layer, name in buffers:
        one = current(layer, name)
        if one is not None:
            value = None
            if copied is None or (id(layer), name) in copied:
                value = (one.detach() if one.requires_grad else one).clone()
            found.append(FoundBuffer(layer, name, one, version_of(one), value))
    return found


class FoundBuffer(NamedTuple):
    """A buffer as it was found."""

    layer: Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor | None
    """A copy of what it held; None: there is none."""

    @property
    def key(self) -> Key:
        return id(self.layer), self.name

    def was_changed(self) -> bool:
        """Is there another tensor in its place, or was it changed in place, as far as torch counts that?"""
        layer, name, tensor, version, _ = self
        return current(layer, name) is not tensor or version_of(tensor) != version

    def holds_others(self) -> bool:
        """Does the tensor hold other values than the copy? On a GPU it waits for them: custom kernels write values
        without torch's count of changes."""
        return version_of(self.tensor) != self.version or _differ(self.tensor, self.value)

    def put_back(self) -> bool:
        """The same tensor, with the values that it had. Returns whether others were there."""
        import torch

        assert self.value is not None
        now, changed = current(self.layer, self.name), self.holds_others()
        if changed:  # not always: what an expanded tensor holds cannot be written
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                self.tensor.copy_(self.value)
        if now is not self.tensor:
            self.layer._buffers[self.name] = self.tensor
            changed = changed or (now is not None and now.shape == self.value.shape and _differ(now, self.value))
        return changed


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; tensors of inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def current(layer: Module, name: str) -> Tensor | None:
    """The tensor that the buffer is now."""
    try:
        return layer._buffers[name]
    except KeyError:  # a scripted module's have no `get`
        return None


def _differ(one: Tensor, copy: Tensor | None) -> bool:
    """As far as it can be told: a forecast's tensors have no values, and sparse ones are not compared."""
    import torch

    if copy is None or type(one) is not torch.Tensor or one.layout is not torch.strided:
        return False
    return one.dtype != copy.dtype or one.device != copy.device or not torch.equal(one, copy)
