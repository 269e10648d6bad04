"""Generates with models that keep a state: recurrent models and encoder-decoders.

The protocol for your own model:

    advance(tokens, state) -> (logits, state)      tokens int64 [batch, tokens], logits [batch, tokens, vocabulary]
    begin(source, valid) -> state                  of an encoder-decoder only: source int64 [batch, source tokens],
                                                   valid bool of that shape, True = a real token

A recurrent model begins with state None, and its `forward(tokens, state)` will do in place of `advance`. A state is a
tensor, or tuples, lists and dicts of tensors and other values. The dimension of a tensor that counts texts is found by
trying batches of one and two; a state without one is of a single text, and texts are then run one by one.

>>> import torch
>>> from flatout.models import CharacterGenerator, CharacterGeneratorConfig
>>> model = CharacterGenerator(CharacterGeneratorConfig(vocab_size=11, embedding_width=4, hidden_width=8)).eval()
>>> logits, state = model.advance(torch.tensor([[1, 2]]))
>>> model.advance(torch.tensor([[3]]), state)[0].shape
torch.Size([1, 1, 11])
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.generation.cache import Span
from flatout.infer.generation.families import REMEDY
from flatout.infer.generation.own_forward import OwnForward, logits_of, trial_tokens
from flatout.infer.generation.share import UncountedWork
from flatout.infer.generation.whole_texts import PADDING
from flatout.precision.outputs import difference
from flatout.torch_private.dispatch import tree_flatten, tree_unflatten

State = Any  # each model has its own kind, and only its engine looks into it
TOKENS, CUT = 6, 4
"""Of the texts that a model is tried on, and where they are cut in two."""


class StateEngine(ABC):
    """A model that keeps a state, and how states are split and put together."""

    encodes: bool
    """Whether it begins with a source."""
    vocabulary: int
    shares: bool
    """Whether several texts may share a batch."""

    def __init__(self, run: OwnForward) -> None:
        self.run, self.device, self.storage, self.max_tokens = run, run.device, run.storage, run.longest

    def passes(self, slots: int, length: int) -> StatePasses:
        """Passes over `slots` texts of one run, of any length."""
        return StatePasses(self, slots)

    @abstractmethod
    def begin(self, sources: Tensor, valid: Tensor) -> State:
        """The state of texts that begin with these sources."""

    @abstractmethod
    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """The logits [texts, tokens, vocabulary] after each of these tokens, and the state after the last."""

    @abstractmethod
    def of_rows(self, state: State, rows: list[int]) -> State:
        """The state of these texts alone."""

    @abstractmethod
    def joined(self, state: State, other: State) -> State | None:
        """The state of both groups of texts; None where they cannot share a batch."""


@dataclass
class _Group:
    """Texts that share a state, in the order of its rows."""

    slots: list[int]
    state: State


class StatePasses:
    """The states of one run's texts."""

    def __init__(self, of: StateEngine, slots: int) -> None:
        self._of, self.slots, self.device = of, slots, of.device
        self._groups: list[_Group] = []

    @property
    def note(self) -> str:
        """What was found out about the model, in words; '' for nothing."""
        return "" if self._of.shares else "one text at a time: its state has no batch dimension"

    work = UncountedWork

    def encode(self, slots: Sequence[int], sources: Sequence[Sequence[int]]) -> None:
        """Read the sources of texts that begin; the one time that the encoder runs for them."""
        self._end(slots)
        together = [list(zip(slots, sources, strict=True))]
        if not self._of.shares:
            together = [[one] for one in together[0]]
        for part in together:
            longest = max(len(source) for _, source in part)
            ids = [[*source, *[PADDING] * (longest - len(source))] for _, source in part]
            lengths = torch.tensor([len(source) for _, source in part], device=self.device)
            valid = torch.arange(longest, device=self.device) < lengths[:, None]
            state = self._of.begin(torch.tensor(ids, device=self.device), valid)
            self._groups.append(_Group([slot for slot, _ in part], state))

    def advance(self, tokens: Tensor, spans: Sequence[Span], *, every: bool = False) -> Tensor:
        """Read tokens, int64 [sum of the spans' lengths]. Returns fp32 logits [spans, vocabulary] of each text's last.

        Texts that are not among the spans have ended, unless all that are begin.
        """
        assert not every, "guessing ahead is refused before"
        parts = dict(zip((span.slot for span in spans), tokens.split([one.length for one in spans]), strict=True))
        if any(span.start for span in spans):
            self._keep_only(parts)
            self._join()
        elif not self._of.encodes:
            self._end(list(parts))
            self._begin(spans)
        found: dict[int, Tensor] = {}
        for group in self._groups:
            if group.slots[0] in parts:
                given = torch.stack([parts[slot] for slot in group.slots])
                logits, group.state = self._of.advance(given, group.state)
                found.update(zip(group.slots, logits[:, -1].float(), strict=True))
        return torch.stack([found[span.slot] for span in spans])

    # inside

    def _begin(self, spans: Sequence[Span]) -> None:
        """Texts of one length read their prompts together, without padding."""
        lengths = sorted({span.length for span in spans})
        for length in lengths:
            slots = [span.slot for span in spans if span.length == length]
            self._groups += [_Group(one, None) for one in ([slots] if self._of.shares else [[s] for s in slots])]

    def _end(self, slots: Sequence[int]) -> None:
        """These slots are taken by other texts."""
        ended = set(slots)
        self._keep_only([slot for group in self._groups for slot in group.slots if slot not in ended])

    def _keep_only(self, slots: Container[int]) -> None:
        groups = []
        for group in self._groups:
            rows = [row for row, slot in enumerate(group.slots) if slot in slots]
            if len(rows) < len(group.slots) and rows:
                group = _Group([group.slots[row] for row in rows], self._of.of_rows(group.state, rows))
            if rows:
                groups.append(group)
        self._groups = groups

    def _join(self) -> None:
        """Groups that began apart go on together, where their states have the same shapes."""
        if len(self._groups) < 2 or not self._of.shares:
            return
        groups: list[_Group] = []
        for group in self._groups:
            for index, other in enumerate(groups):
                state = self._of.joined(other.state, group.state)
                if state is not None:
                    groups[index] = _Group([*other.slots, *group.slots], state)
                    break
            else:
                groups.append(group)
        self._groups = groups


class ModelSteps(StateEngine):
    """A model that keeps the protocol of this module."""

    def __init__(self, run: OwnForward, *, method: str) -> None:
        super().__init__(run)
        self._method = method
        self.encodes = hasattr(run.model, "begin")
        single = torch.zeros(1, 1, dtype=torch.int64, device=run.device)
        self.vocabulary = self.advance(single, self._begun(single))[0].shape[-1]
        self._dimensions = self._checked()
        self.shares = self._dimensions is not None

    def begin(self, sources: Tensor, valid: Tensor) -> State:
        return self.run.call("begin", sources, valid)

    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        given = (tokens,) if state is None else (tokens, state)
        found = self.run.call(self._method, *given)
        if not isinstance(found, tuple | list) or len(found) != 2:
            what = f"{type(self.run.model).__name__}.{self._method} gives a {type(found).__name__}"
            raise UsageError(what, limit="it gives (logits, state)", remedy="see flatout.infer.generation.stepping")
        return logits_of(found, tokens, self.run.model), found[1]

    def of_rows(self, state: State, rows: list[int]) -> State:
        leaves, form = tree_flatten(state)
        assert self._dimensions is not None, "a text alone is never one of several rows"
        picked = [
            leaf if dimension is None else leaf.index_select(dimension, torch.tensor(rows, device=leaf.device))
            for leaf, dimension in zip(leaves, self._dimensions, strict=True)
        ]
        return tree_unflatten(picked, form)

    def joined(self, state: State, other: State) -> State | None:
        (ours, form), (theirs, other_form) = tree_flatten(state), tree_flatten(other)
        if self._dimensions is None or form != other_form:
            return None
        made = []
        for dimension, a, b in zip(self._dimensions, ours, theirs, strict=True):
            differ = a != b if dimension is None else _shape_without(a, dimension) != _shape_without(b, dimension)
            if differ:
                return None
            made.append(a if dimension is None else torch.cat((a, b), dimension))
        return tree_unflatten(made, form)

    # inside

    def _begun(self, sources: Tensor) -> State:
        return self.begin(sources, torch.ones_like(sources, dtype=torch.bool)) if self.encodes else None

    def _checked(self) -> list[int | None] | None:
        """That a text in two parts has the logits that it has in one, else UsageError: the state does not carry a text
        on. Returns the dimensions by which two texts may share a batch; None: they may not."""
        device, model = self.device, self.run.model
        texts = torch.stack([trial_tokens(model, self.vocabulary, TOKENS, seed) for seed in (1, 2)]).to(device)
        most = self.run.closeness
        wholes = [self.advance(text[None], self._begun(text[None]))[0][:, -1].clone() for text in texts]
        # Both are begun before one goes on: a state that the next text overwrites is none.
        states = [self.advance(text[None, :CUT], self._begun(text[None]))[1] for text in texts]
        for text, whole, state in zip(texts, wholes, states, strict=True):
            rest, _ = self.advance(text[None, CUT:], state)
            apart = difference(rest[0, -1], whole[0])
            if apart > most:
                what = f"from the state after {CUT} tokens on, the logits differ from the whole text's by {apart:.1%}"
                limit = f"{most:.1%} of their spread is allowed: the state is all that is kept of a text"
                remedy = "return a state that holds everything of the tokens before, in memory of its own"
                raise UsageError(what, limit=limit, remedy=remedy)
        return self._shared_dimensions(texts, [whole[0] for whole in wholes], states[0], most)

    def _shared_dimensions(
        self, texts: Tensor, wholes: list[Tensor], single: State, most: float
    ) -> list[int | None] | None:
        try:
            _, pair = self.advance(texts[:, :CUT], self._begun(texts))
            rest, _ = self.advance(texts[:, CUT:], pair)
        except UsageError:  # it takes a single text
            return None
        apart = max(difference(row, whole) for row, whole in zip(rest[:, -1], wholes, strict=True))
        return None if apart > most else dimensions_of(single, pair)


def dimensions_of(single: State, pair: State) -> list[int | None] | None:
    """Of each leaf of a state, the dimension that counts texts: 1 in the first state and 2 in the second.

    None for a leaf that is no tensor and the same in both. None in place of the list: some leaf has none.
    """
    (ones, form), (twos, other) = tree_flatten(single), tree_flatten(pair)
    if form != other:
        return None
    found: list[int | None] = []
    for one, two in zip(ones, twos, strict=True):
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            if type(one) is not type(two) or not isinstance(one, int | float | str | bool | None) or one != two:
                return None
            found.append(None)
            continue
        pairs = zip(one.shape, two.shape, strict=False)
        places = [place for place, (a, b) in enumerate(pairs) if a != b]
        if one.dim() != two.dim() or [(one.shape[place], two.shape[place]) for place in places] != [(1, 2)]:
            return None
        found.append(places[0])
    return found


def _shape_without(tensor: Tensor, dimension: int) -> tuple[int, ...]:
    return (*tensor.shape[:dimension], *tensor.shape[dimension + 1 :])


def recurrent_steps(run: OwnForward) -> tuple[ModelSteps | None, str]:
    """The model as one that keeps a state; None, and why, for one that keeps none.

    UsageError for a model with a method `advance` that does not keep the protocol.
    """
    model: nn.Module = run.model
    if callable(getattr(model, "advance", None)):
        return ModelSteps(run, method="advance"), ""
    try:
        found = run(torch.zeros(1, 1, dtype=torch.int64, device=run.device))
    except UsageError:
        return None, ""  # who runs it next will say why
    if type(found) not in (tuple, list) or len(found) != 2:
        return None, ""
    if not any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in tree_flatten(found[1])[0]):
        return None, ""
    try:
        return ModelSteps(run, method="forward"), ""
    except UsageError as error:
        return None, f"what it returns besides its logits is not a state: {error.what}"


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether transformers calls it one."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and hasattr(model, "generation_config")


class _Cache(Protocol):
    def batch_select_indices(self, indices: Tensor) -> None: ...


@dataclass
class _Read:
    """Sources that were encoded, and what the decoder keeps of the texts so far."""

    hidden: Tensor
    """[texts, source tokens, width]"""
    mask: Tensor
    """int64 [texts, source tokens], 1 = a real token."""
    cache: _Cache | None = None
    """transformers' own; None before the first token."""


class EncoderDecoderSteps(StateEngine):
    """An encoder-decoder of transformers (T5, BART and others), by its own forward pass and its own cache.

    The encoder runs once for each source; texts that began together go on together, and leave the batch as they end.
    UsageError for one whose sources are no tokens, or whose cache, or padded sources, give other logits than the whole
    forward pass.
    """

    encodes = True
    shares = True

    def __init__(self, run: OwnForward) -> None:
        super().__init__(run)
        model = run.model
        name = getattr(model, "main_input_name", "input_ids")
        if name != "input_ids" or not hasattr(model, "get_encoder"):
            what = f"the {type(model).__name__} reads {name}"
            raise UsageError(what, limit="a source here is a text, or its token ids", remedy=REMEDY)
        # the argument and the output: renamed in transformers 5.24
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        single = torch.zeros(1, 1, dtype=torch.int64, device=run.device)
        self.vocabulary = self._whole(single, single).shape[-1]
        self._check()

    def begin(self, sources: Tensor, valid: Tensor) -> _Read:
        mask = valid.to(torch.int64)
        found = self.run.call("get_encoder()", input_ids=sources, attention_mask=mask)
        return _Read(hidden=found[0], mask=mask)

    def advance(self, tokens: Tensor, state: _Read) -> tuple[Tensor, _Read]:
        found = self.run(
            encoder_outputs=(state.hidden,),
            attention_mask=state.mask,
            decoder_input_ids=tokens,
            use_cache=True,
            **{self._cache: state.cache},
        )
        return logits_of(found, tokens, self.run.model), _Read(state.hidden, state.mask, getattr(found, self._cache))

    def of_rows(self, state: _Read, rows: list[int]) -> _Read:
        picked = torch.tensor(rows, device=state.hidden.device)
        if state.cache is not None:
            state.cache.batch_select_indices(picked)
        return _Read(state.hidden[picked], state.mask[picked], state.cache)

    def joined(self, state: _Read, other: _Read) -> None:
        """Never: their texts have other lengths."""

    # inside

    def _whole(self, source: Tensor, target: Tensor) -> Tensor:
        found = self.run(input_ids=source, decoder_input_ids=target, use_cache=False)
        return logits_of(found, target, self.run.model)

    def _check(self) -> None:
        """A short source beside a longer one, the target in two parts, against the whole forward pass of each."""
        model, device = self.run.model, self.run.device
        draw = [trial_tokens(model, self.vocabulary, TOKENS, seed).to(device)[None] for seed in (1, 2, 3, 4)]
        short, long, targets = draw[0][:, :CUT], draw[1], torch.cat(draw[2:])
        wanted = [self._whole(source, target[None]) for source, target in zip((short, long), targets, strict=True)]
        sources = torch.cat((nn.functional.pad(short, (0, TOKENS - CUT)), long))
        valid = torch.ones_like(sources, dtype=torch.bool)
        valid[0, CUT:] = False
        first, state = self.advance(targets[:, :CUT], self.begin(sources, valid))
        second, _ = self.advance(targets[:, CUT:], state)
        apart = difference(torch.cat((first, second), dim=1), torch.cat(wanted))
        most = self.run.closeness
        if apart > most:
            what = f"with its cache, the {type(model).__name__}'s logits differ by {apart:.1%} of their spread"
            raise UsageError(what, limit=f"{most:.1%} is allowed", remedy=REMEDY)
