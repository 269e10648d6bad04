"""Random numbers that a block draws by itself, for its recomputation: there the same ones come again.

`torch.utils.checkpoint` puts back torch's own generators. Those of Python and numpy, and a `torch.Generator` that the
block holds, it does not know: a noise or a dropped layer drawn from them would differ from the forward pass, and the
gradients would be of another function, without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.generators import other_generator_states, set_generators
from flatout.levers.changing_buffers import Around, Context

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


class Generators:
    """The generators that a block may draw from, besides torch's own."""

    def __init__(self, block: Module) -> None:
        self._block = block
        self._own: list[torch.Generator] | None = None

    def states(self) -> States:
        import torch

        if self._own is None:  # in its first call, as a block may make its generator after it was built
            held = (value for part in self._block.modules() for value in vars(part).values())
            self._own = [value for value in held if isinstance(value, torch.Generator)]
        return States([(one, one.get_state()) for one in self._own])


class States:
    """Of all of them, at one moment."""

    def __init__(self, own: list[tuple[torch.Generator, Tensor]]) -> None:
        self._own, self._others = own, other_generator_states()

    def put_back(self) -> None:
        set_generators(self._others)
        for generator, state in self._own:
            generator.set_state(state)


class FirstDraws(Around):
    """The call of a block in the forward pass."""

    def __init__(self, generators: Generators, inner: Context) -> None:
        super().__init__(inner)
        self.generators = generators
        self.before: States | None = None

    def begin(self) -> None:
        self.before = self.generators.states()

    def end(self, *, succeeded: bool) -> None:
        pass


class SameDraws(Around):
    """The same call in the backward pass; what the program draws next is what it would have drawn."""

    def __init__(self, first: FirstDraws, inner: Context) -> None:
        super().__init__(inner)
        self._first = first
        self._now: States | None = None

    def begin(self) -> None:
        self._now = self._first.generators.states()
        if self._first.before is not None:
            self._first.before.put_back()

    def end(self, *, succeeded: bool) -> None:
        if self._now is not None:
            self._now.put_back()
        self._now = None
