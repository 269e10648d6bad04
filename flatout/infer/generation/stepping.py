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

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.generation.cache import Span
from flatout.infer.generation.own_forward import OwnForward, difference, logits_of, trial_tokens
from flatout.infer.generation.share import UncountedWork
from flatout.infer.generation.whole_texts import PADDING
from flatout.torch_private.dispatch import tree_flatten, tree_unflatten

State = Any  # each model has its own kind, and only its stepper looks into it
TOKENS, CUT = 6, 4
"""Of the texts that a model is tried on, and where they are cut in two."""


class Stepper(Protocol):
    """A model that keeps a state, and how states are split and put together."""

    encodes: bool
    """Whether it begins with a source."""
    vocabulary: int

    def begin(self, sources: Tensor, valid: Tensor) -> State: ...

    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]: ...

    def of_rows(self, state: State, rows: list[int]) -> State:
        """The state of these texts alone."""

    def joined(self, states: Sequence[State]) -> State | None:
        """The state of all these texts; None where they cannot share a batch."""

    @property
    def shares(self) -> bool:
        """Whether several texts may share a batch."""


class StateEngine:
    """A stepper, as generation takes it."""

    def __init__(self, run: OwnForward, stepper: Stepper, max_tokens: int | None = None) -> None:
        self.stepper, self.device, self.storage = stepper, run.device, run.storage
        self.max_tokens, self.vocabulary, self.encodes = max_tokens, stepper.vocabulary, stepper.encodes

    def passes(self, slots: int) -> StatePasses:
        """Passes over `slots` texts of one run."""
        return StatePasses(self.stepper, slots, self.device)


@dataclass
class _Group:
    """Texts that share a state, in the order of its rows."""

    slots: list[int]
    state: State


class StatePasses:
    """The states of one run's texts."""

    def __init__(self, stepper: Stepper, slots: int, device: torch.device) -> None:
        self._stepper, self.slots, self.device = stepper, slots, device
        self._groups: list[_Group] = []

    @property
    def note(self) -> str:
        """What was found out about the model, in words; '' for nothing."""
        return "" if self._stepper.shares else "one text at a time: its state has no batch dimension"

    def work(self) -> UncountedWork:
        return UncountedWork("the model is run by its own forward pass, which is not counted")

    def encode(self, slots: Sequence[int], sources: Sequence[Sequence[int]]) -> None:
        """Read the sources of texts that begin; the one time that the encoder runs for them."""
        self._end(slots)
        together = [list(zip(slots, sources, strict=True))]
        if not self._stepper.shares:
            together = [[one] for one in together[0]]
        for part in together:
            longest = max(len(source) for _, source in part)
            ids = [[*source, *[PADDING] * (longest - len(source))] for _, source in part]
            lengths = torch.tensor([len(source) for _, source in part], device=self.device)
            valid = torch.arange(longest, device=self.device) < lengths[:, None]
            state = self._stepper.begin(torch.tensor(ids, device=self.device), valid)
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
        elif not self._stepper.encodes:
            self._end(list(parts))
            self._begin(spans)
        found: dict[int, Tensor] = {}
        for group in self._groups:
            if group.slots[0] in parts:
                given = torch.stack([parts[slot] for slot in group.slots])
                logits, group.state = self._stepper.advance(given, group.state)
                found.update(zip(group.slots, logits[:, -1].float(), strict=True))
        return torch.stack([found[span.slot] for span in spans])

    # inside

    def _begin(self, spans: Sequence[Span]) -> None:
        """Texts of one length read their prompts together, without padding."""
        lengths = sorted({span.length for span in spans})
        for length in lengths:
            slots = [span.slot for span in spans if span.length == length]
            self._groups += [_Group(one, None) for one in ([slots] if self._stepper.shares else [[s] for s in slots])]

    def _end(self, slots: Sequence[int]) -> None:
        """These slots are taken by other texts."""
        ended = set(slots)
        self._keep_only([slot for group in self._groups for slot in group.slots if slot not in ended])

    def _keep_only(self, slots: Container[int]) -> None:
        groups = []
        for group in self._groups:
            rows = [row for row, slot in enumerate(group.slots) if slot in slots]
            if len(rows) < len(group.slots) and rows:
                group = _Group([group.slots[row] for row in rows], self._stepper.of_rows(group.state, rows))
            if rows:
                groups.append(group)
        self._groups = groups

    def _join(self) -> None:
        """Groups that began apart go on together, where their states have the same shapes."""
        if len(self._groups) < 2 or not self._stepper.shares:
            return
        groups: list[_Group] = []
        for group in self._groups:
            for index, other in enumerate(groups):
                state = self._stepper.joined([other.state, group.state])
                if state is not None:
                    groups[index] = _Group([*other.slots, *group.slots], state)
                    break
            else:
                groups.append(group)
        self._groups = groups


class ModelSteps:
    """A model that keeps the protocol of this module."""

    def __init__(self, run: OwnForward, *, method: str) -> None:
        self._run, self._method = run, method
        model = run.model
        self.encodes = hasattr(model, "begin")
        single = torch.zeros(1, 1, dtype=torch.int64, device=run.device)
        first = self._begun(single)
        self.vocabulary = self.advance(single, first)[0].shape[-1]
        self._dimensions: list[int | None] | None = None
        self._check()

    @property
    def shares(self) -> bool:
        return self._dimensions is not None

    def begin(self, sources: Tensor, valid: Tensor) -> State:
        return self._run.call("begin", sources, valid)

    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        given = (tokens,) if state is None else (tokens, state)
        found = self._run.call(self._method, *given)
        if not isinstance(found, tuple | list) or len(found) != 2:
            what = f"{type(self._run.model).__name__}.{self._method} gives a {type(found).__name__}"
            raise UsageError(what, limit="it gives (logits, state)", remedy="see flatout.infer.generation.stepping")
        return logits_of(found, tokens, self._run.model), found[1]

    def of_rows(self, state: State, rows: list[int]) -> State:
        leaves, form = tree_flatten(state)
        assert self._dimensions is not None, "a text alone is never one of several rows"
        picked = [
            leaf if dimension is None else leaf.index_select(dimension, torch.tensor(rows, device=leaf.device))
            for leaf, dimension in zip(leaves, self._dimensions, strict=True)
        ]
        return tree_unflatten(picked, form)

    def joined(self, states: Sequence[State]) -> State | None:
        leaves, forms = zip(*(tree_flatten(one) for one in states), strict=True)
        if self._dimensions is None or any(form != forms[0] for form in forms):
            return None
        made = []
        for dimension, parts in zip(self._dimensions, zip(*leaves, strict=True), strict=True):
            if dimension is None:
                if any(part != parts[0] for part in parts):
                    return None
                made.append(parts[0])
            else:
                if any(_shape_without(part, dimension) != _shape_without(parts[0], dimension) for part in parts):
                    return None
                made.append(torch.cat(parts, dimension))
        return tree_unflatten(made, forms[0])

    # inside

    def _begun(self, sources: Tensor) -> State:
        return self.begin(sources, torch.ones_like(sources, dtype=torch.bool)) if self.encodes else None

    def _check(self) -> None:
        """That a text in two parts has the logits that it has in one, and whether two texts may share a batch.

        UsageError where the state does not carry a text on.
        """
        device, model = self._run.device, self._run.model
        texts = torch.stack([trial_tokens(model, self.vocabulary, TOKENS, seed) for seed in (1, 2)]).to(device)
        most = self._run.closeness
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
        self._dimensions = self._found_dimensions(texts, [whole[0] for whole in wholes], states[0], most)

    def _found_dimensions(
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
        places = (
            []
            if one.dim() != two.dim()
            else [place for place, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if sizes[0] != sizes[1]]
        )
        if len(places) != 1 or one.shape[places[0]] != 1 or two.shape[places[0]] != 2:
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
