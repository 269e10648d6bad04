"""What a block changes as it computes: its recomputation in the backward pass finds it as the first computation did.

Buffers (running statistics, a power iteration's vector, a count of calls) have the values that the first computation
found, and what changes is a copy: a batch counts once in them. Random generators that `torch.utils.checkpoint` does not
put back by itself (Python's, numpy's, a `torch.Generator` that the block holds) give the same numbers again. Otherwise
the gradients would be those of another function, without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from flatout.buffers import FoundBuffer, Key, buffers_of, current, found_buffers, version_of
from flatout.errors import UsageError
from flatout.generators import other_generator_states, set_generators

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

Context: TypeAlias = AbstractContextManager[object]


class RecomputedBlock:
    """A block, and what is known of the buffers and generators that its calls change."""

    def __init__(self, block: Module) -> None:
        self._block, self._has_buffers = block, any(True for _ in block.buffers())
        self._changing: set[Key] | None = None
        """Buffers that its calls have changed, and those of norms, which a layer that is frozen now may change later.
        Others, such as a large mask, are copied once."""
        self._own: list[torch.Generator] | None = None

    def contexts(self, forward: Context, recomputation: Context) -> tuple[Context, Context]:
        """Around one call and its recomputations, with the given contexts inside."""
        call = _Call(self)
        return call.computed(forward), _Again(lambda: call.again(recomputation))

    def buffers(self) -> list[FoundBuffer]:
        """All, as they are before a call; with a copy, those that it may change."""
        return found_buffers(buffers_of(self._block), self._changing) if self._has_buffers else []

    def changed(self, before: list[FoundBuffer]) -> list[FoundBuffer]:
        """Those that the recomputation has to find as they were.

        Raises UsageError for one that a call changes in place for the first time: there is no copy of it.
        """
        from flatout.torch_private.modules import NormWithStatistics

        first, known, kept = self._changing is None, self._changing or set(), []
        for one in before:
            if one.value is None and version_of(one.tensor) != one.version:
                raise UsageError(
                    f"a block of the model, {type(self._block).__name__}, changes its buffer {one.name}, which its "
                    "first call did not change",
                    limit="activation checkpointing computes a block a second time, with the buffers that it found",
                    remedy="drop activation_checkpointing, or let that buffer change from the first step on",
                )
            if one.key in known or one.was_changed() or (first and isinstance(one.layer, NormWithStatistics)):
                kept.append(one)
        self._changing = known | {one.key for one in kept}
        return kept

    def draws(self) -> Callable[[], None]:
        """Returns a function that puts the generators back to where they are now."""
        import torch

        if self._own is None:  # in its first call, as a block may make its generator after it was built
            held = (value for part in self._block.modules() for value in vars(part).values())
            self._own = [value for value in held if isinstance(value, torch.Generator)]
        own, others = [(one, one.get_state()) for one in self._own], other_generator_states()

        def put_back() -> None:
            set_generators(others)
            for generator, state in own:
                generator.set_state(state)

        return put_back


class _Call:
    """One call of a block in the forward pass, and what it found."""

    def __init__(self, block: RecomputedBlock) -> None:
        self._block = block
        self._buffers: list[FoundBuffer] = []
        self._draw_again: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def computed(self, inner: Context) -> Iterator[None]:
        self._draw_again, self._buffers = self._block.draws(), self._block.buffers()
        with inner:
            yield
        self._buffers = self._block.changed(self._buffers)

    @contextlib.contextmanager
    def again(self, inner: Context) -> Iterator[None]:
        """What the program draws next is what it would have drawn."""
        draw_on, now = self._block.draws(), [current(one.layer, one.name) for one in self._buffers]
        self._draw_again()
        copies: dict[int, Tensor] = {}  # layers that share a buffer share its copy
        for one in self._buffers:
            if id(one.tensor) not in copies:
                copies[id(one.tensor)] = (one.tensor if one.value is None else one.value).clone()
            one.layer._buffers[one.name] = copies[id(one.tensor)]
        try:
            with inner:
                yield
        finally:
            for one, tensor in zip(self._buffers, now, strict=True):
                one.layer._buffers[one.name] = tensor
            draw_on()


class _Again:
    """A context that may be entered again: a block is computed again in each backward pass."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._inside = self._make()
        self._inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._inside.__exit__(kind, error, trace)
