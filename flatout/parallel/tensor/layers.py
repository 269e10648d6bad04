"""Layers that compute with this rank's part of their weights.

Names and types of a model stay as they are: a layer gets another `forward`, and remembers in `cuts` how each of its
parameters is cut. Its state dict holds whole tensors in the model's own layout, and takes them: a collective.

torch's ColwiseParallel and RowwiseParallel take neither several matrices in one nor transposed ones (the Conv1D of
transformers), and send each small operation through DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any  # Any: see Layer

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.parallel.tensor.parts import Across, Cut, cut_of, entered, summed
from flatout.parallel.tensor.random import OwnStream
from flatout.parallel.tensor.scores import split_scores
from flatout.parallel.whole_tensors import CUT, CUTS, like, whole_or_cut

OWN_STREAM = "own_random_stream"
"""Attribute of a layer: the stream of random numbers that ends at its input. CUTS is {parameter: its Cut}."""

Layer = Any
"""A Linear, Embedding or Conv1D, of which only some attributes are used."""


def columns_forward(self: Layer, x: Tensor) -> Tensor:
    """[..., in] on all ranks -> this rank's outputs."""
    return _product(self, x, self.bias)


def rows_forward(self: Layer, x: Tensor) -> Tensor:
    """This rank's inputs -> [..., out] on all ranks. The bias is added once, to the sum."""
    term = _product(self, x, None)
    if OWN_STREAM in self.__dict__:
        self.__dict__[OWN_STREAM].end()
    total = summed(term, self.__dict__[CUTS]["weight"].across)
    return total if self.bias is None else total + self.bias


def _product(self: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
    """A Conv1D holds the transpose of what a Linear does."""
    return F.linear(x, self.weight if isinstance(self, nn.Linear) else self.weight.t(), bias)


def scores_forward(self: Layer, x: Tensor) -> Tensor:
    """[..., in] on all ranks -> the scores of all tokens, gathered where they are needed whole."""
    cut: Cut = self.__dict__[CUTS]["weight"]
    return split_scores(F.linear(entered(x, cut.across), self.weight, self.bias), cut)


def embedding_forward(self: Layer, tokens: Tensor) -> Tensor:
    """Whole numbers [...] -> their rows [..., width], on all ranks: each adds those that it has."""
    cut: Cut = self.__dict__[CUTS]["weight"]
    first, last = cut.bounds
    known = getattr(self, "vocab_size", cut.shape[0])  # rows of padding are no tokens
    mine = (tokens >= first) & (tokens < last)
    # a token that there is not is an error on every rank, as it is with a whole table
    local = torch.where(mine, tokens - first, torch.where((tokens >= 0) & (tokens < known), 0, last - first))
    padding = self.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < last else None
    rows = F.embedding(local, self.weight, own_padding)
    return summed(rows.masked_fill(~mine.unsqueeze(-1), 0.0), cut.across)


def set_forward(layer: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Have this one layer compute with `forward`; a deep copy of it computes with its own weights."""
    layer.__dict__["forward"] = MethodType(forward, layer)


def cut_parameter(layer: nn.Module, name: str, cut: Cut) -> None:
    """Keep this rank's part of a parameter, in place: optimizers and layers that share it go on using it."""
    parameter = layer.get_parameter(name)
    if cut_of(parameter) is None:  # else another layer has it too
        parameter.data = cut.part(parameter.data)
        parameter.grad = None
        setattr(parameter, CUT, cut)
    if CUTS not in layer.__dict__:
        layer.__dict__[CUTS] = {}
        layer.register_state_dict_post_hook(_whole_state)
        layer.register_load_state_dict_pre_hook(_part_of_state)
    layer.__dict__[CUTS][name] = cut


def _whole_state(layer: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    for name, cut in layer.__dict__[CUTS].items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # these are asked for with keep_vars
            state[prefix + name] = whole_or_cut(value, cut)


def _part_of_state(layer: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    for name, cut in layer.__dict__[CUTS].items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            state[prefix + name] = like(layer.get_parameter(name), cut.part(value))


class Entrance:
    """A hook before the forward of a module whose columns are cut."""

    def __init__(self, arguments: tuple[str, ...], positions: tuple[int, ...], across: Across) -> None:
        self._arguments, self._positions, self._across = arguments, positions, across
        self.own_stream: OwnStream | None = None
        self.dropout: str | None = None
        """Path and attribute, from the module, of what it drops."""

    def __call__(
        self, module: nn.Module, inputs: tuple[object, ...], keywords: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        changed = list(inputs)
        device = None
        for name, position in zip(self._arguments, self._positions, strict=True):
            by_name, by_place = keywords.get(name), changed[position] if position < len(changed) else None
            if isinstance(by_name, Tensor):
                keywords = {**keywords, name: entered(by_name, self._across)}
                device = by_name.device
            elif isinstance(by_place, Tensor):
                changed[position] = entered(by_place, self._across)
                device = by_place.device
        if self.own_stream is not None and device is not None and module.training and self._drops(module):
            self.own_stream.begin(device)
        return tuple(changed), keywords

    def _drops(self, module: nn.Module) -> bool:
        assert self.dropout is not None
        found: object = module
        for part in self.dropout.split("."):
            found = getattr(found, part)
        return bool(found)
