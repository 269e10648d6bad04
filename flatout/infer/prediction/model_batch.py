"""A batch made of samples, one call of the model on it, and its output cut into samples again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from flatout.arguments import described
from flatout.data.nested import map_leaves
from flatout.errors import UsageError
from flatout.infer.output_tensors import is_tensor, output_tensors, output_values
from flatout.infer.prediction.calling import Calling
from flatout.infer.prediction.packing import packed_blocks
from flatout.infer.prediction.placed import Placed
from flatout.infer.prediction.samples import Noise, Sample


@dataclass(frozen=True)
class Layout:
    """Dimension of the batch by path of the output (0 for a path that is not named).

    [batch, ...] as most models have it; [layers, batch, ...] for the last states of torch's recurrent layers and the
    memories of XLNet; no dimension for what `x.squeeze()` leaves of a batch of one.

    >>> one, three = torch.zeros(2, 1, 6), torch.zeros(2, 3, 6)
    >>> find_layout({"state": one}, {"state": three}, 3)
    (Layout(batch={'state': 1}, squeezed=frozenset()), '')
    """

    batch: Mapping[str, int] = field(default_factory=dict)
    squeezed: frozenset[str] = frozenset()
    """Paths that have no batch dimension where the batch is one row."""

    def dimension(self, path: str, leaf: Tensor, rows: int) -> int | None:
        """The dimension of samples in an output of `rows` rows; None: it is a single sample without one.

        UsageError where it has not a row for each.
        """
        if rows == 1 and path in self.squeezed:
            return None
        dimension = self.batch.get(path, 0)
        if leaf.dim() <= dimension or leaf.shape[dimension] != rows:
            what = f"{path} is {list(leaf.shape)} for a batch of {rows}"
            remedy = "wrap the model so that it returns only what belongs to samples"
            raise UsageError(what, limit="each tensor of the output has a row for each sample", remedy=remedy)
        return dimension


def find_layout(one: Mapping[str, Tensor], several: Mapping[str, Tensor], rows: int) -> tuple[Layout, str]:
    """From the outputs for one row and for `rows` of the same shape; with the reason where there is no such layout."""
    if one.keys() != several.keys():
        return Layout(), f"it returns {', '.join(several)} for {rows} samples, {', '.join(one)} for one"
    batch: dict[str, int] = {}
    squeezed = set()
    for path, leaf in one.items():
        alone, together = tuple(leaf.shape), tuple(several[path].shape)
        changed = [d for d, (a, b) in enumerate(zip(alone, together, strict=False)) if a != b]
        if together == (rows, *alone):
            squeezed.add(path)
            batch[path] = 0
        elif len(alone) == len(together) and [(alone[d], together[d]) for d in changed] == [(1, rows)]:
            batch[path] = changed[0]
        else:
            return Layout(), f"{path} is {list(together)} for {rows} samples, {list(alone)} for one"
    return Layout({path: at for path, at in batch.items() if at}, frozenset(squeezed)), ""


Batching = Literal["packed", "equal", "padded", "alone"]


@dataclass
class Runner:
    """Calls one placed model. `blocks` are its repeated blocks, for packing."""

    placed: Placed
    calling: Calling
    blocks: Sequence[nn.Module] = ()
    token_level: frozenset[str] | None = None
    """Which leaves of the output have a row for each token, by path; None until two lengths have run."""
    layout: Layout = field(default_factory=Layout)
    """Where samples lie in the output."""
    call: Callable[..., object] | None = None
    """Called instead of the model: its compiled form."""

    def run(
        self,
        samples: Sequence[Sample],
        how: Batching,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        padding: Noise | None = None,
    ) -> object:
        """The model's output for these samples of one kind, its batch dimension first, on the model's device.

        equal, alone: they are of one length. rows, tokens: fill the batch up to that shape (so that few shapes are
        compiled). padding: what to put into padding instead of the padding id.
        """
        lengths = [sample.tokens for sample in samples]
        longest = max(lengths) if tokens is None else tokens
        tensors = self._stacked(samples, longest, padding)
        sequence = samples[0].length is not None
        ragged = how in ("packed", "padded") and sequence and (tokens is not None or len(set(lengths)) > 1)
        masked = ragged or (sequence and (self.calling.mask_required or samples[0].mask_dtype is not None))
        if masked and self.calling.mask_name is not None and self.calling.mask_name not in tensors:
            tensors[self.calling.mask_name] = self._mask(lengths, longest, samples[0].mask_dtype)
        if rows is not None and rows > len(samples):
            tensors = {name: _filled(one, rows) for name, one in tensors.items()}
        args = [tensors.pop(place) for place in range(len(tensors)) if place in tensors]
        keywords: dict[str, object] = {str(name): one for name, one in tensors.items()}
        keywords |= dict(self.calling.constants)
        packing: AbstractContextManager[None] = contextlib.nullcontext()
        if how == "packed" and ragged:
            packing = packed_blocks(self.blocks, lengths, self.placed.device)
        with packing:
            return (self.call or self.placed)(*args, **keywords)

    def cut(self, output: object, samples: Sequence[Sample], *, padded: bool, rows: int | None = None) -> list[object]:
        """The output of each sample, on the CPU, in the dtype that the user's model gives; each in memory of its own.

        rows: of the batch, if it was filled up. Raises UsageError where a tensor has not a row for each of them.
        """
        host = map_leaves(self._to_host, output, is_tensor)
        trimmed = (self.token_level or frozenset()) if padded else frozenset()
        taken = {
            id(leaf): (self.layout.dimension(path, leaf, rows or len(samples)), path in trimmed)
            for path, leaf in output_tensors(host)
        }

        if not taken:
            what = f"the model returned {described(output)}, without a tensor"
            limit = "each tensor of the output has a row for each sample"
            raise UsageError(what, limit=limit, remedy="return a tensor, or several in a tuple or dict")

        def take(leaf: Tensor, place: int, length: int | None) -> Tensor:
            dimension, trim = taken[id(leaf)]
            row = leaf if dimension is None else leaf.select(dimension, place)
            return (row[:length] if trim else row).clone()

        return [
            map_leaves(partial(take, place=place, length=sample.length), host, is_tensor)
            for place, sample in enumerate(samples)
        ]

    def outputs(self, output: object, samples: Sequence[Sample], *, padded: bool) -> list[dict[str, object]]:
        """What `cut` gives of each sample, tensors and other values, by path."""
        cut = self.cut(output, samples, padded=padded)
        return [dict(output_values(row)) for row in cut]

    @staticmethod
    def leaves(output: object) -> dict[str, Tensor]:
        """The tensors of the output, copied: a model may return buffers that it overwrites in the next call."""
        return {path: leaf.detach().clone() for path, leaf in output_tensors(output)}

    def alone(self, sample: Sample) -> dict[str, object]:
        """The reference: the outputs of a sample run by itself, uncompiled."""
        call, self.call = self.call, None
        try:
            return self.outputs(self.run([sample], "alone"), [sample], padded=False)[0]
        finally:
            self.call = call

    def _mask(self, lengths: Sequence[int], tokens: int, dtype: torch.dtype | None) -> Tensor:
        made = self.calling.mask(torch.tensor(lengths, device=self.placed.device), tokens, dtype)
        return made.to(self.placed.dtype) if made.is_floating_point() else made

    def _to_host(self, leaf: Tensor) -> Tensor:
        dtype = self.placed.result_dtype if leaf.is_floating_point() else None
        return leaf.detach().to(device="cpu", dtype=dtype or leaf.dtype)

    def _stacked(self, samples: Sequence[Sample], longest: int, padding: Noise | None) -> dict[str | int, Tensor]:
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

    def _padded(self, name: str | int, parts: Sequence[Tensor], longest: int, padding: Noise | None) -> Tensor:
        main = name == self.calling.input_name or name == 0
        shape = (len(parts), longest, *parts[0].shape[1:])
        if main and padding is not None:
            stacked = padding.like(parts[0], shape)
        else:
            masks_padding = name == self.calling.mask_name and self.calling.mask_style == "padding"
            stacked = parts[0].new_full(shape, self.calling.padding_id if main else int(masks_padding))
        for row, part in zip(stacked, parts, strict=True):
            row[: len(part)] = part
        return stacked

    def _on_device(self, tensor: Tensor) -> Tensor:
        dtype = self.placed.input_dtype if tensor.is_floating_point() else None
        moved = tensor.to(device=self.placed.device, dtype=dtype or tensor.dtype)
        if self.placed.channels_last and moved.dim() == 4:
            moved = moved.contiguous(memory_format=torch.channels_last)
        return moved


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """The last row again and again: any other content might be one that the model refuses."""
    return torch.cat((tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])))
