"""A batch made of samples, one call of the model on it, and its output cut into samples again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatout.data.nested import leaves_in, map_leaves
from flatout.errors import UsageError
from flatout.infer.prediction.calling import Calling
from flatout.infer.prediction.packing import packed_blocks
from flatout.infer.prediction.placed import Placed
from flatout.infer.prediction.samples import Sample

Batching = Literal["packed", "equal", "padded"]


@dataclass
class Runner:
    """Calls one placed model. `blocks` are its repeated blocks, for packing."""

    placed: Placed
    calling: Calling
    blocks: Sequence[nn.Module] = ()
    token_level: frozenset[str] | None = None
    """Which leaves of the output have a row for each token, by path; None until samples of two lengths were seen."""
    call: Any = None
    """What is called in place of the model: its compiled form."""

    def run(
        self,
        samples: Sequence[Sample],
        how: Batching,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        padding: int | None = None,
    ) -> Any:
        """The model's output for these samples of one kind, its batch dimension first, on the model's device.

        equal: they are of one length. rows, tokens: fill the batch up to that shape (so that few shapes are compiled).
        padding: what to put into padding instead of the padding id.
        """
        lengths = [sample.tokens for sample in samples]
        longest = max(lengths) if tokens is None else tokens
        tensors = self._stacked(samples, longest, padding)
        ragged = how != "equal" and samples[0].length is not None and (tokens is not None or len(set(lengths)) > 1)
        if ragged and self.calling.mask_name is not None and self.calling.mask_name not in tensors:
            at = torch.tensor(lengths, device=self.placed.device)
            tensors[self.calling.mask_name] = self.calling.mask(at, longest)
        if rows is not None and rows > len(samples):
            tensors = {name: _filled(one, rows) for name, one in tensors.items()}
        args = [tensors.pop(place) for place in range(len(tensors)) if place in tensors]
        keywords: dict[str, Any] = {str(name): one for name, one in tensors.items()}
        keywords |= dict(self.calling.constants)
        packing: Any = contextlib.nullcontext()
        if how == "packed" and ragged:
            packing = packed_blocks(self.blocks, lengths, self.placed.device)
        with packing:
            return (self.call or self.placed.model)(*args, **keywords)

    def cut(self, output: Any, samples: Sequence[Sample], *, padded: bool) -> list[Any]:
        """The output of each sample, on the CPU, in the dtype of the user's model; a row of its own memory each.

        Raises UsageError where a tensor of the output has not a row for each sample.
        """
        rows = len(samples)
        for path, leaf in leaves_in(output, "output", _is_tensor):
            if leaf.dim() == 0 or leaf.shape[0] < rows:
                what = f"{path} is {list(leaf.shape)} for a batch of {rows}"
                remedy = "wrap the model so that it returns only what belongs to samples"
                raise UsageError(what, limit="each tensor of the output has a row for each sample", remedy=remedy)
        host = map_leaves(self._to_host, output, _is_tensor)
        return [self._row(host, place, sample, padded) for place, sample in enumerate(samples)]

    def _row(self, output: Any, place: int, sample: Sample, padded: bool) -> Any:
        if not padded or not self.token_level:
            return map_leaves(lambda leaf: leaf[place].clone(), output, _is_tensor)
        trimmed = {id(leaf) for path, leaf in leaves_in(output, "output", _is_tensor) if path in self.token_level}

        def take(leaf: Tensor) -> Tensor:
            row = leaf[place]
            return (row[: sample.length] if id(leaf) in trimmed else row).clone()

        return map_leaves(take, output, _is_tensor)

    def _to_host(self, leaf: Tensor) -> Tensor:
        dtype = self.placed.result_dtype if leaf.is_floating_point() else leaf.dtype
        return leaf.detach().to(device="cpu", dtype=dtype)

    def _stacked(self, samples: Sequence[Sample], longest: int, padding: int | None) -> dict[str | int, Tensor]:
        found: dict[str | int, Tensor] = {}
        for name in samples[0].tensors:
            parts = [sample.tensors[name] for sample in samples]
            sequence = parts[0].dim() in (1, 2) and parts[0].shape[0] == samples[0].length
            if sequence and (len({len(part) for part in parts}) > 1 or len(parts[0]) != longest):
                stacked = self._padded(name, parts, longest, padding)
            else:
                stacked = torch.stack(parts)
            found[name] = self._on_device(stacked)
        return found

    def _padded(self, name: str | int, parts: Sequence[Tensor], longest: int, padding: int | None) -> Tensor:
        main = name == self.calling.input_name or name == 0
        value = (self.calling.padding_id if padding is None else padding) if main else 0
        stacked = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), value)
        for row, part in zip(stacked, parts, strict=True):
            row[: len(part)] = part
        return stacked

    def _on_device(self, tensor: Tensor) -> Tensor:
        dtype = self.placed.dtype if tensor.is_floating_point() else tensor.dtype
        moved = tensor.to(device=self.placed.device, dtype=dtype)
        if self.placed.channels_last and moved.dim() == 4:
            moved = moved.contiguous(memory_format=torch.channels_last)
        return moved


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """The last row again and again: any other content might be one that the model refuses."""
    return torch.cat((tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
