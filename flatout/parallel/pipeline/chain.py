"""A model's repeated blocks in their order, and what stands in for those that other ranks compute.

Every rank runs the whole forward of the model, and the loss function around it, as they are written; only blocks are
exchanged. So what comes before the blocks (embeddings, masks, positions) is there on every stage, and what follows them
is computed by the last one alone:

    blocks before the stage    return NaN at once: whatever reads them by mistake cannot go unnoticed
    its first block            is given what the stage before has sent
    its blocks                 as they are
    the block after it         ends the forward: its input is what is sent to the next stage
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any  # Any: a block's output

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flatout.data.nested import map_tensors
from flatout.errors import UsageError
from flatout.levers.compile import repeated_blocks

_OTHERWISE = "use parallel = 'fsdp', which works for any model"
Arguments = tuple[tuple[object, ...], dict[str, object]]  # of whatever a model passes to its blocks


class StageEnd(BaseException):
    """The input of the block after a stage is there. No error, so that no `except Exception` of a model catches it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Asked(AttributeError):
    """A model reads an attribute of one of its blocks, in whose place something else stands."""


class StandIn(nn.Module):
    """Called in a block's place."""

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.__dict__["call"] = call

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.__dict__["call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # as torch declares it
        raise _Asked(name)

    def __getitem__(self, key: object) -> nn.Module:
        raise _Asked(f"[{key}]")


@dataclass(kw_only=True)
class Seen:
    """What one forward showed."""

    seconds: list[float]
    """Of each block."""
    before_seconds: float
    after_seconds: float


class Chain:
    """The blocks of one model. Raises UsageError for a model without any."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = repeated_blocks(model)
        self.several = False
        """Does a block return a tuple, of which the first is passed on?"""
        if len(self.blocks) < 2:
            raise UsageError(
                f"parallel is 'pipeline', and {type(model).__name__} has no repeated blocks",
                limit="a pipeline's stages are made of blocks of one class that follow each other",
                remedy=_OTHERWISE,
            )
        places: dict[nn.Module, list[tuple[nn.Module, str]]] = {block: [] for block in self.blocks}
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None and child in places:
                    places[child].append((module, name))
        if any(len(found) > 1 for found in places.values()):
            raise self._no_chain("a block occurs in it more than once")
        self._places = [places[block][0] for block in self.blocks]

    @contextlib.contextmanager
    def replaced(self, make: Callable[[int], StandIn | None]) -> Iterator[None]:
        """With make(i) in place of block i, where it is not None."""
        made = [make(i) for i in range(len(self.blocks))]
        try:
            for (parent, name), stand_in in zip(self._places, made, strict=True):
                if stand_in is not None:
                    parent._modules[name] = stand_in
            yield
        except _Asked as error:
            raise self._no_chain(f"its forward reads {error} of a block") from error
        finally:
            for (parent, name), block in zip(self._places, self.blocks, strict=True):
                parent._modules[name] = block

    def observe(self, forward: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Seen:
        """Run one forward of the whole model. Raises UsageError unless it calls each block once, in their order, with
        inputs of one shape. Waits for the device at every block. clock: what blocks take is measured by."""
        order: list[int] = []
        seconds = [0.0] * len(self.blocks)
        shapes: set[torch.Size] = set()
        dtypes: set[torch.dtype] = set()
        ends: list[float] = []

        def timed(i: int) -> StandIn:
            def call(*args: object, **kwargs: object) -> object:
                hidden = hidden_of((args, kwargs))
                if hidden is None:
                    raise self._no_chain("its blocks are not called with a tensor of floating point")
                shapes.add(hidden.shape)
                if i:  # what the first is given is not sent
                    dtypes.add(hidden.dtype)
                _wait(hidden)
                began = clock()
                output = self.blocks[i](*args, **kwargs)
                _wait(hidden)
                ends.append(clock())
                first = output[0] if isinstance(output, tuple) and output else output
                if not isinstance(first, Tensor) or first.shape != hidden.shape:
                    raise self._no_chain("a block's output has another shape than its input")
                self.several = isinstance(output, tuple)
                seconds[i] = ends[-1] - began
                order.append(i)
                return output

            return StandIn(call)

        began = clock()
        with self.replaced(timed):
            forward()
        whole = clock() - began
        if order != list(range(len(self.blocks))):
            raise self._no_chain("its forward does not call each block once, in their order")
        if len(shapes) > 1 or len(dtypes) > 1:
            raise self._no_chain("its blocks have inputs of different shapes or dtypes")
        after = began + whole - ends[-1]
        return Seen(
            seconds=seconds,
            before_seconds=max(0.0, whole - sum(seconds) - after),
            after_seconds=after,
        )

    def kept_bytes(self, forward: Callable[[], object]) -> list[int]:
        """Run one forward of the whole model. Of each block, the activations that it keeps for its backward pass: those
        of one block at a time are in memory."""
        found = [0] * len(self.blocks)

        def watched(i: int) -> StandIn:
            def call(*args: object, **kwargs: object) -> object:
                hidden = hidden_of((args, kwargs))
                assert hidden is not None, "observe has seen one"
                own = {_storage(one) for one in self.blocks[i].parameters()}
                seen: dict[StorageWeakRef, int] = {}

                def note(saved: Tensor) -> None:
                    if (storage := _storage(saved)) not in own:
                        seen[storage] = saved.untyped_storage().nbytes()

                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, _never_read):
                    given = hidden.detach().requires_grad_() * 1  # no leaf: a block may change it in place
                    output = _called(self.blocks[i], (args, kwargs), given)
                seen.setdefault(_storage(given), given.nbytes)  # a checkpoint keeps it without saying so
                found[i] = sum(seen.values())
                return map_tensors(Tensor.detach, output)

            return StandIn(call)

        with self.replaced(watched):
            forward()
        return found

    def stage(self, forward: Callable[[], Tensor], first: int, last: int, received: Tensor | None) -> Tensor:
        """What blocks first to last - 1 make of `received`: the last stage's is what `forward` returns."""

        def make(i: int) -> StandIn | None:
            if i < first:
                return StandIn(self._passed)
            if i == first and received is not None:
                return StandIn(lambda *args, **kwargs: _called(self.blocks[i], (args, kwargs), received))
            if i == last:
                return StandIn(_end)
            return None

        with self.replaced(make):
            try:
                output = forward()
            except StageEnd as end:
                return end.hidden
        if last < len(self.blocks):
            raise self._no_chain("loss_fn did not call them all")
        return output

    def relayed(
        self, forward: Callable[[], object], begins: list[int], rank: int, send: Callable[[Tensor, int], Tensor]
    ) -> object:
        """One forward of all stages, one after the other: send(tensor, rank) is that of this rank, on all of them."""
        owner = {i: stage for stage in range(len(begins) - 1) for i in range(begins[stage], begins[stage + 1])}

        def make(i: int) -> StandIn:
            def call(*args: object, **kwargs: object) -> object:
                hidden = hidden_of((args, kwargs))
                assert hidden is not None, "each block has been called with one"
                if i == 0:  # what comes before the blocks is the first stage's
                    hidden = send(hidden, 0)
                if owner[i] == rank:
                    output: Any = _called(self.blocks[i], (args, kwargs), hidden)
                else:
                    output = self._passed(hidden)
                if i + 1 == begins[owner[i] + 1]:
                    first = send(output[0] if isinstance(output, tuple) else output, owner[i])
                    output = (first, *output[1:]) if isinstance(output, tuple) else first
                return output

            return StandIn(call)

        with self.replaced(make):
            return forward()

    def _passed(self, *args: object, **kwargs: object) -> object:
        hidden = hidden_of((args, kwargs))
        assert hidden is not None, "each block has been called with one"
        nan = torch.full((), float("nan"), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
        return (nan, None) if self.several else nan

    def _no_chain(self, why: str) -> UsageError:
        return UsageError(
            f"parallel is 'pipeline', and the model's {type(self.blocks[0]).__name__}s do not form a chain: {why}",
            limit="a stage passes one tensor on to the next",
            remedy=_OTHERWISE,
        )


def _end(*args: object, **kwargs: object) -> object:
    hidden = hidden_of((args, kwargs))
    assert hidden is not None, "each block has been called with one"
    raise StageEnd(hidden)


def hidden_of(arguments: Arguments) -> Tensor | None:
    """What a block is given by the one before it: the first argument, or the first by name; None if that is none."""
    for value in (*arguments[0][:1], *([] if arguments[0] else arguments[1].values())):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def _called(block: nn.Module, arguments: Arguments, hidden: Tensor) -> object:
    """With another one in the place of that."""
    args, kwargs = arguments
    if args:
        return block(hidden, *args[1:], **kwargs)
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
    return block(**{**kwargs, name: hidden})


def _never_read(saved: object) -> Tensor:
    raise AssertionError("no backward pass follows")


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
