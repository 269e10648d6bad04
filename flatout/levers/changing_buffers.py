"""Buffers that a block changes as it computes (running statistics, a power iteration's vector, a count of calls), for
its recomputation: there they have the values that the first computation found, and what changes is a copy.

A batch then counts once in them, and a result that depends on them is computed again as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Context: TypeAlias = AbstractContextManager[object]


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; tensors of inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class _Before:
    """A buffer before a call of its block."""

    layer: Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor

    def was_changed(self) -> bool:
        now = self.layer._buffers.get(self.name)
        return now is not self.buffer or version_of(self.buffer) != self.version


class ChangingBuffers:
    """Of one block: those that its calls have changed, and those of norms, which a layer that is frozen now may change
    later. Others, such as a large mask, are copied once."""

    def __init__(self, block: Module) -> None:
        self._block = block
        self._known: list[tuple[Module, str]] | None = None

    def copied(self) -> list[_Before]:
        """All, as they are before the call that is about to begin; with a copy, those that it may change."""
        every = [(layer, name) for layer in self._block.modules() for name in layer._buffers]
        return [
            _Before(layer, name, buffer, version_of(buffer), buffer.detach().clone() if copies else buffer)
            for layer, name in every
            if (buffer := layer._buffers.get(name)) is not None
            for copies in (self._known is None or (layer, name) in self._known,)
        ]

    def changed(self, before: list[_Before]) -> list[_Before]:
        """Those of `before` that the recomputation has to find as they were.

        Raises UsageError for one that a call changes in place for the first time: there is no copy of it.
        """
        from flatout.torch_private.modules import NormWithStatistics

        known = self._known or []
        kept = []
        for one in before:
            is_known = (one.layer, one.name) in known
            if not is_known and one.was_changed() and one.value is one.buffer and version_of(one.buffer) != one.version:
                raise UsageError(
                    f"a block of the model, {type(self._block).__name__}, changes its buffer {one.name}, which its "
                    "first call did not change",
                    limit="activation checkpointing computes a block a second time, with the buffers that it found",
                    remedy="drop activation_checkpointing, or let that buffer change from the first step on",
                )
            if is_known or one.was_changed() or (self._known is None and isinstance(one.layer, NormWithStatistics)):
                kept.append(one)
        self._known = known + [(one.layer, one.name) for one in kept if (one.layer, one.name) not in known]
        return kept


class Around(ABC):
    """A context around `inner`. It may be entered again: a block is computed again in each backward pass."""

    def __init__(self, inner: Context) -> None:
        self._inner = inner

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self, *, succeeded: bool) -> None: ...

    def __enter__(self) -> None:
        self.begin()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self._inner.__exit__(kind, error, trace)
        finally:
            self.end(succeeded=kind is None)


class FirstComputation(Around):
    """The call of a block in the forward pass: notes what its buffers were."""

    def __init__(self, buffers: ChangingBuffers, inner: Context) -> None:
        super().__init__(inner)
        self._buffers = buffers
        self.before: list[_Before] = []

    def begin(self) -> None:
        self.before = self._buffers.copied()

    def end(self, *, succeeded: bool) -> None:
        if succeeded:
            self.before = self._buffers.changed(self.before)


class Recomputation(Around):
    """The same call in the backward pass."""

    def __init__(self, first: FirstComputation, inner: Context) -> None:
        super().__init__(inner)
        self._first = first
        self._now: list[dict[str, Tensor | None]] = []

    def begin(self) -> None:
        before = self._first.before
        self._now = [dict(one.layer._buffers) for one in before]
        for one in before:
            one.layer._buffers[one.name] = one.value.clone()

    def end(self, *, succeeded: bool) -> None:
        for one, buffers in zip(self._first.before, self._now, strict=True):
            one.layer._buffers.update(buffers)
        self._now = []
