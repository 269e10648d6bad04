"""When a batch does not fit: is splitting exact for this model, and what to restore after a failed attempt.

The gradients of a batch are the weighted sum of its parts' gradients unless the model mixes samples. A batch norm does
(its statistics are those of the part), so a split batch trains a slightly different model.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from flatout.buffers import FoundBuffer, Key, buffers_of, current, found_buffers
from flatout.errors import MachineError, UsageError, describe_error
from flatout.generators import set_generators, torch_generator_states

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


def batch_coupled_layers(model: Module) -> list[str]:
    """Names of the layers in training mode whose output for a sample depends on the others in its batch."""
    from flatout.torch_private.modules import BatchNorm

    named = model.named_modules()
    names = [name for name, layer in named if isinstance(layer, BatchNorm) and layer.training]
    return [f"layer {name}" if name.isdigit() else name or "the model" for name in names]


class Attempts:
    """Those of one model's steps: which buffers they change, so that only these are copied."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._buffers: list[tuple[Module, str]] = []
        self._changing: set[Key] | None = None
        """None until a first attempt has shown them."""

    @property
    def are_known(self) -> bool:
        return self._changing is not None

    def copy_none(self) -> None:
        """None of them will be tried again."""
        self._changing = set()

    def begin(self) -> Attempt:
        if self._changing is None:
            self._buffers = buffers_of(self._model)
        return Attempt(found_buffers(self._buffers, self._changing))

    def succeeded(self, attempt: Attempt) -> None:
        if self._changing is None:
            self._changing = attempt.keep_changed()
        elif first := attempt.first_changes():  # an average that begins after a while
            self._changing |= {one.key for one in first}


class Attempt:
    """What a forward and backward pass changes besides gradients, to be restored: torch's random states and buffers."""

    def __init__(self, buffers: list[FoundBuffer]) -> None:
        self._generators = torch_generator_states()
        self._buffers = buffers
        """Without a copy those that no attempt has changed so far."""

    def put_back(self, *, buffers: bool = True) -> None:
        set_generators(self._generators)
        if buffers:
            self._put_back_buffers()

    def _put_back_buffers(self) -> None:
        for one in self._buffers:
            if one.value is not None:
                one.put_back()

    def first_changes(self) -> list[FoundBuffer]:
        """Buffers that were changed by no attempt before this one, and of which there is no copy."""
        return [one for one in self._buffers if one.value is None and one.was_changed()]

    def check_restorable(self) -> None:
        """MachineError where the buffers cannot be put back."""
        for one in self.first_changes():
            raise MachineError(
                "a batch does not fit, and the failed attempt has changed the buffer "
                f"{one.name} of {type(one.layer).__name__}",
                limit="a batch is tried again only from what it found, and no step had changed that buffer before",
                remedy="resume from the last checkpoint with a smaller batch, or with micro_batches",
            )

    def put_back_where(self, skipped: Tensor) -> None:
        """The buffers alone, where `skipped`, a scalar, is true; on a GPU the choice is made there, without waiting.

        NaN in one batch would otherwise stay in the running statistics of a norm for good.
        """
        import torch

        known = type(skipped) is torch.Tensor  # a fake tensor of a forecast has no value
        if known and skipped.is_cpu:
            if skipped:
                self._put_back_buffers()
            return
        for one in self._buffers:
            if one.value is None:
                continue
            tensor = one.tensor
            if current(one.layer, one.name) is tensor and tensor.layout is torch.strided:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(torch.where(skipped.to(tensor.device), one.value, tensor))
            elif known and skipped:
                one.put_back()

    def keep_changed(self) -> set[Key]:
        """Keep the copies of those alone that this attempt has changed, and of norms, which a layer that is frozen now
        may change later; returns which these are. On a GPU it waits for the values."""
        from flatout.torch_private.modules import NormWithStatistics

        self._buffers = [
            one
            for one in self._buffers
            if isinstance(one.layer, NormWithStatistics) or one.was_changed() or one.holds_others()
        ]
        return {one.key for one in self._buffers}


def explain_part(error: Exception, model: Module, samples: int, parts: int, *, split_here: bool) -> None:
    """Raise an error that explains what a part raises although it fits, such as batch norm on one sample.

    split_here: the whole batch did not fit, so that it was split in this step.
    """
    if split_here:
        raise MachineError(
            f"a batch of {samples} does not fit, and a part of it fails: {describe_error(error)}",
            limit=f"it was split into {parts} parts",
            remedy="use a smaller batch; with out_of_memory = 'raise' it is not split",
        ) from error
    coupled = batch_coupled_layers(model)
    if not coupled or not 1 < parts <= samples < 2 * parts or "more than 1 value per channel" not in str(error):
        return
    raise UsageError(
        f"a batch of {samples} in {parts} parts has parts of a single sample",
        limit=f"{coupled[0]} takes its statistics from at least 2",
        remedy="use a smaller micro_batches, or batches with drop_last=True if it is the last of an epoch",
    ) from error


def release(model: Module, optimizer: Optimizer) -> None:
    """Free what a failed attempt left: its gradients, reference cycles of its graph, and the allocator's cache."""
    import torch

    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
