"""When a batch does not fit: is splitting exact for this model, and what to restore after a failed attempt.

The gradients of a batch are the weighted sum of its parts' gradients unless the model mixes samples. A batch norm does
(its statistics are those of the part), so a split batch trains a slightly different model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from flatout.errors import MachineError, describe_error
from flatout.generators import set_generators, torch_generator_states
from flatout.levers.changing_buffers import version_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


def batch_coupled_layers(model: Module) -> list[str]:
    """Names of the layers in training mode whose output for a sample depends on the others in its batch."""

    from flatout.torch_private.modules import BatchNorm

    coupled = (BatchNorm,)
    return [
        name or "the model" for name, layer in model.named_modules() if isinstance(layer, coupled) and layer.training
    ]


Buffer: TypeAlias = "tuple[Module, str]"
"""A layer, and the name of its buffer."""


def buffers_of(model: Module) -> list[Buffer]:
    return [(layer, name) for layer in model.modules() for name, _ in layer.named_buffers(recurse=False)]


class Attempts:
    """Those of one model's steps: which buffers they change, so that only these are copied."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._changing: list[Buffer] | None = None
        """None until a first attempt has shown them."""
        self._steady: list[Buffer] = []

    @property
    def are_known(self) -> bool:
        return self._changing is not None

    def copy_none(self) -> None:
        """None of them will be tried again."""
        self._changing = []

    def begin(self) -> Attempt:
        if self._changing is None:
            return Attempt(buffers_of(self._model))
        return Attempt(self._changing, steady=self._steady)

    def succeeded(self, attempt: Attempt) -> None:
        if self._changing is None:
            self._changing = attempt.changed()
            self._steady = [one for one in buffers_of(self._model) if one not in self._changing]
        elif found := attempt.first_changes():  # an average that begins after a while
            self._changing += found
            self._steady = [one for one in self._steady if one not in found]


class Attempt:
    """What a forward and backward pass changes besides gradients, to be restored: torch's random states and buffers."""

    def __init__(self, buffers: Iterable[Buffer], *, steady: Iterable[Buffer] = ()) -> None:
        """steady: buffers that no attempt has changed so far, of which there is no copy."""
        self._steady = [
            (layer, name, buffer, version_of(buffer))
            for layer, name in steady
            if (buffer := layer._buffers.get(name)) is not None
        ]
        self._generators = torch_generator_states()
        self._buffers: list[tuple[Module, str, Tensor, int, Tensor]] = [
            (layer, name, buffer, version_of(buffer), buffer.clone())
            for layer, name in buffers
            if (buffer := getattr(layer, name, None)) is not None
        ]

    def put_back(self, *, buffers: bool = True) -> None:
        import torch

        set_generators(self._generators)
        with torch.no_grad():
            for layer, name, buffer, _, value in self._buffers if buffers else ():
                _write(buffer, value)
                if getattr(layer, name, None) is not buffer:
                    setattr(layer, name, buffer)

    def first_changes(self) -> list[Buffer]:
        """Buffers that were changed by no attempt before this one, and of which there is no copy."""
        return [
            (layer, name)
            for layer, name, buffer, version in self._steady
            if layer._buffers.get(name) is not buffer or version_of(buffer) != version
        ]

    def check_restorable(self) -> None:
        """MachineError where the buffers cannot be put back."""
        for layer, name in self.first_changes():
            raise MachineError(
                f"a batch does not fit, and the failed attempt has changed the buffer {name} of {type(layer).__name__}",
                limit="a batch is tried again only from what it found, and no step had changed that buffer before",
                remedy="resume from the last checkpoint with a smaller batch, or with micro_batches",
            )

    def put_back_where(self, skipped: Tensor) -> None:
        """The buffers alone, where `skipped`, a scalar, is true; on a GPU the choice is made there, without waiting.

        NaN in one batch would otherwise stay in the running statistics of a norm for good.
        """
        import torch

        known = type(skipped) is torch.Tensor  # a fake tensor of a forecast has no value
        if known and skipped.is_cpu and not skipped:
            return
        with torch.no_grad():
            for layer, name, buffer, _, value in self._buffers:
                if getattr(layer, name, None) is buffer and buffer.layout is torch.strided:
                    buffer.copy_(torch.where(skipped.to(buffer.device), value, buffer))
                elif known and skipped:
                    buffer.copy_(value)
                    setattr(layer, name, buffer)

    def changed(self) -> list[Buffer]:
        """Those that this attempt has changed, and those of norms, which a layer that is frozen now may change later.

        On a GPU it waits for the values: a layer may write them in a way that torch does not count.
        """
        import torch

        from flatout.torch_private.modules import NormWithStatistics

        def is_same(buffer: Tensor, version: int, value: Tensor) -> bool:
            if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:  # a forecast's has no values
                return version_of(buffer) == version
            return torch.equal(buffer, value)

        return [
            (layer, name)
            for layer, name, buffer, version, value in self._buffers
            if isinstance(layer, NormWithStatistics)
            or getattr(layer, name, None) is not buffer
            or version_of(buffer) != version
            or not is_same(buffer, version, value)
        ]


def part_fails(error: Exception, samples: int, parts: int) -> MachineError:
    """For what a part raises although it fits, such as batch norm on one sample."""
    return MachineError(
        f"a batch of {samples} does not fit, and a part of it fails: {describe_error(error)}",
        limit=f"it was split into {parts} parts",
        remedy="use a smaller batch; with out_of_memory = 'raise' it is not split",
    )


def _write(buffer: Tensor, value: Tensor) -> None:
    """What an expanded or an inference tensor holds cannot be written as that of others can."""
    import torch

    if type(buffer) is torch.Tensor and buffer.layout is torch.strided and torch.equal(buffer, value):
        return
    with torch.inference_mode(buffer.is_inference()):
        buffer.copy_(value)


def release(model: Module, optimizer: Optimizer) -> None:
    """Free what a failed attempt left: its gradients, reference cycles of its graph, and the allocator's cache."""
    import torch

    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
