"""Packing without padding: the tokens of many sequences in one row while a model's repeated blocks run.

    embeddings    [batch, longest]       as the model has it: positions, token types and masks are right by themselves
    blocks        [1, all real tokens]   nearly all of the work; attention within each sequence alone
    heads         [batch, longest]       put back, so that poolers and classifiers find their tokens

Hooks on the first and the last block change the shape. In between torch's scaled_dot_product_attention is intercepted
and called once for each run of sequences of equal length, with that part of the mask that the model gave which lies
inside a sequence, so that causal masks and relative positions keep their meaning. On a CPU with products of bf16 a
kernel of Flatout's takes all sequences at once, where their masks let everything through. Whether a model can be run so
is tried, never assumed (`flatout.infer.prediction.allowed`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flatout.data.nested import map_leaves
from flatout.infer.output_tensors import is_tensor
from flatout.kernels.bf16_products import obstacle
from flatout.kernels.operators import packed_attention

_Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of a call."""
_Hook = Callable[[nn.Module, tuple[object, ...], dict[str, object]], _Arguments]


class CannotPack(Exception):
    """Why a model's blocks cannot run on one row of many sequences."""


@contextlib.contextmanager
def packed_blocks(blocks: Sequence[nn.Module], lengths: Sequence[int], device: torch.device) -> Iterator[None]:
    """For one call of the model, on a batch padded to the longest of `lengths` (adjacent equals are run together)."""
    row = _Row(lengths, device)
    handles = [
        block.register_forward_pre_hook(row.entering(first=number == 0), with_kwargs=True)
        for number, block in enumerate(blocks)
    ]
    handles.append(blocks[-1].register_forward_hook(row.leaving))
    try:
        with row:
            yield
        row.check_done()
    finally:
        for handle in handles:
            handle.remove()


def row_length(tokens: int) -> int:
    """Tokens of a row that holds so many real ones: a few more, at most one in 32.

    oneDNN makes, and keeps, code for each number of rows that it meets; so there are few numbers.

    >>> row_length(17), row_length(2001)
    (17, 2016)
    """
    step = 1 << max(0, tokens.bit_length() - 6)
    return -(-tokens // step) * step


class _Row(TorchFunctionMode):
    """The layout of one batch, and what torch's functions do differently while it lies in one row."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.lengths = list(lengths)
        self.batch, self.longest, self.total = len(lengths), max(lengths), sum(lengths)
        places = torch.arange(self.longest, device=device).expand(self.batch, -1)
        real = places < torch.as_tensor(lengths, device=device)[:, None]
        self.real = real.flatten().nonzero().squeeze(1)
        self.width = row_length(self.total)
        filling = self.real.new_zeros(self.width - self.total)  # the first token again
        self.taken = torch.cat((self.real, filling))
        self.runs: list[tuple[int, int, int, int]] = []
        """(first sequence, how many, their length, first token)"""
        sequence = token = 0
        for length, members in groupby(lengths):
            count = len(list(members))
            self.runs.append((sequence, count, length, token))
            sequence, token = sequence + count, token + count * length
        self.packed = self.finished = False
        self.attentions = 0
        self._masks: list[tuple[Tensor, list[Tensor | None]]] = []

    # the borders

    def entering(self, *, first: bool) -> _Hook:
        """A hook before a block: the hidden states into one row (first), and whatever else is laid out as they were."""

        def enter(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> _Arguments:
            if first:
                if self.packed or self.finished:
                    raise CannotPack("its first block is called twice")
                self.packed = True
                hidden = args[0] if args else next(iter(kwargs.values()), None)
                if hidden is None or not self._is_laid_out(hidden) or hidden.shape[0] != self.batch:
                    raise CannotPack(f"its blocks take {_shape(hidden)}, not [batch, tokens, width]")
            elif not self.packed:
                raise CannotPack("its blocks are not called in the order in which they stand")
            args, kwargs = map_leaves(self._pack, (args, kwargs), is_tensor)
            return args, kwargs

        return enter

    def leaving(self, block: nn.Module, args: object, output: object) -> object:
        """A hook behind the last block: hidden states as they were, with zeros in padding."""
        self.packed, self.finished = False, True
        return map_leaves(self._unpack, output, is_tensor)

    def check_done(self) -> None:
        if not self.finished:
            raise CannotPack("its last block was not reached")
        if not self.attentions:
            raise CannotPack("its blocks do not call scaled_dot_product_attention")

    def _is_laid_out(self, value: object) -> TypeGuard[Tensor]:
        """[batch or 1, longest, features], so a value for each token."""
        if not isinstance(value, Tensor) or value.dim() != 3 or not value.is_floating_point():
            return False
        return value.shape[1] == self.longest and value.shape[0] in (1, self.batch)

    def _pack(self, value: Tensor) -> Tensor:
        if not self._is_laid_out(value):
            return value
        return value.expand(self.batch, -1, -1).flatten(0, 1).index_select(0, self.taken)[None]

    def _unpack(self, value: Tensor) -> Tensor:
        if value.dim() != 3 or value.shape[:2] != (1, self.width):
            return value
        padded = value.new_zeros(self.batch * self.longest, value.shape[2])
        out: Tensor = padded.index_copy_(0, self.real, value[0, : self.total]).unflatten(0, (self.batch, self.longest))
        return out

    # attention

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        call: Callable[..., object] = func
        if self.packed and func is F.scaled_dot_product_attention:
            call = self._attend
        return call(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        for name, part in (("queries", query), ("keys", key), ("values", value)):
            if part.dim() != 4 or part.shape[0] != 1 or part.shape[2] != self.width:
                raise CannotPack(f"the {name} of its attention are {list(part.shape)}")
        self.attentions += 1
        masks = self._masks_of(attn_mask)
        plain = dropout_p == 0 and all(mask is None for mask in masks)
        if plain and query.shape[1] == key.shape[1] and _by_bf16_kernels(query, key, value):
            return packed_attention(query, key, value, self.lengths, causal=is_causal, scale=scale)
        # Laid out as [tokens, heads, features]: merging the heads is then a view, as models expect of torch's kernel.
        out = query.new_empty(1, self.width, query.shape[1], value.shape[3]).transpose(1, 2)
        out[:, :, self.total :] = 0
        for (_, count, length, start), mask in zip(self.runs, masks, strict=True):
            q, k, v = (_sequences(part, start, count, length) for part in (query, key, value))
            mixed = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            _sequences(out, start, count, length).copy_(mixed)
        return out

    def _masks_of(self, mask: Tensor | None) -> list[Tensor | None]:
        """For each run of sequences what the model's mask says of their real tokens; None where it lets all through."""
        if mask is None:
            return [None] * len(self.runs)
        for known, masks in self._masks:
            if known is mask:
                return masks
        batched = mask.dim() == 4 and mask.shape[0] in (1, self.batch) and mask.shape[3] == self.longest
        if not batched or mask.shape[2] not in (1, self.longest):
            raise CannotPack(f"the mask of its attention is {list(mask.shape)}")
        masks = [self._cut(mask, first, count, length) for first, count, length, _ in self.runs]
        self._masks.append((mask, masks))
        return masks

    def _cut(self, mask: Tensor, first: int, count: int, length: int) -> Tensor | None:
        rows = mask if mask.shape[0] == 1 else mask[first : first + count]
        inside = rows[:, :, :length, :length]
        open_everywhere = inside.all() if inside.dtype is torch.bool else (inside == 0).all()
        return None if bool(open_everywhere) else inside


def _by_bf16_kernels(*parts: Tensor) -> bool:
    """Are these in bf16, on a CPU that has such products? The kernel is built where it is wanted for the first time."""
    if any(part.dtype is not torch.bfloat16 or part.device.type != "cpu" for part in parts):
        return False
    return obstacle("matrix_attention") is None


def _sequences(part: Tensor, start: int, count: int, length: int) -> Tensor:
    """[1, heads, tokens, features] -> a view of `count` sequences, [count, heads, length, features]."""
    out: Tensor = part[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
    return out


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
