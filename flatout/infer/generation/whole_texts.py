"""Generates with any model that returns logits, without a cache: the whole text is recomputed for each token.

Texts of a pass share a batch, the shorter ones padded on the right. That is correct only if no token attends to later
tokens or to other rows, so it is checked on the actual texts: where a text alone has other logits, each text gets its
own pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.generation.cache import Span
from flatout.infer.generation.own_forward import OwnForward, logits_of, trial_tokens
from flatout.infer.generation.share import UncountedWork
from flatout.infer.prediction.calling import forward_parameters
from flatout.precision.outputs import difference

LOGITS_BYTES = 256 << 20
"""Of one call of the model, which may give logits for every token of every text."""
PADDING = 0
"""A valid id: padding is not read."""
TOKENS, CUT = 6, 3
"""Of the text on which a model shows whether its tokens see later ones, and how many are read without those."""


class WholeTexts:
    """A model that gives logits for every token of a text, or for its last one."""

    encodes = False

    def __init__(self, run: OwnForward) -> None:
        self.run, self.device, self.storage, self.max_tokens = run, run.device, run.storage, run.longest
        parameters = forward_parameters(run.model)
        self._no_cache = {"use_cache": False} if run.from_transformers or "use_cache" in parameters else {}
        self.takes_mask = run.from_transformers and "attention_mask" in parameters
        self.takes_places = run.from_transformers and "logits_to_keep" in parameters
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        first = self.logits(one).clone()
        self.vocabulary = first.shape[-1]
        self.repeats = not difference(self.logits(one), first) > run.closeness
        """Whether a text has the same logits twice."""
        self.sees_later = self.repeats and self._sees_later()
        """Whether a token's logits depend on the tokens after it."""

    def passes(self, slots: int, length: int) -> WholeTextPasses:
        """Passes over `slots` texts of one run, of any length."""
        return WholeTextPasses(self, slots)

    def logits(self, tokens: Tensor, places: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """int64 [batch, tokens] -> the model's logits [batch, tokens or 1, vocabulary].

        places: int64, the tokens whose logits are asked for, of a model that `takes_places`. mask: int64 [batch,
        tokens], 0 = padding, for one that `takes_mask`.
        """
        named: dict[str, object] = {**self._no_cache, "logits_to_keep": places, "attention_mask": mask}
        found = self.run(tokens, **{name: one for name, one in named.items() if one is not None})
        return logits_of(found, tokens, self.run.model, None if places is None else len(places))

    def _sees_later(self) -> bool:
        if self.max_tokens is not None and self.max_tokens < TOKENS:
            return False
        tokens = trial_tokens(self.run.model, self.vocabulary, TOKENS).to(self.device)[None]
        try:
            without, logits = self.logits(tokens[:, :CUT]).clone(), self.logits(tokens)
        except UsageError:  # it takes other ids or lengths: its texts will say so
            return False
        every = without.shape[1] == CUT and logits.shape[1] == TOKENS
        return every and difference(logits[:, :CUT], without) > self.run.closeness


class WholeTextPasses:
    """The texts of one run: token ids on the device, one tensor a slot."""

    def __init__(self, of: WholeTexts, slots: int) -> None:
        self._of, self.slots, self.device = of, slots, of.device
        self._texts: dict[int, Tensor] = {}
        self._together: dict[bool, bool] = {}
        """Whether texts may share a batch, of unequal lengths and of equal ones: where it was tried."""

    @property
    def note(self) -> str:
        """What was found out on the way, in words; '' for nothing."""
        return "" if all(self._together.values()) else "one text at a time: together they have other logits"

    work = UncountedWork

    def advance(self, tokens: Tensor, spans: Sequence[Span], *, every: bool = False) -> Tensor:
        """Put tokens, int64 [sum of the spans' lengths], behind their texts. Returns fp32 logits [spans, vocabulary]
        of each text's last token."""
        assert not every, "guessing ahead is refused before"
        for span, part in zip(spans, tokens.split([span.length for span in spans]), strict=True):
            before = self._texts.get(span.slot) if span.start else None
            self._texts[span.slot] = part if before is None else torch.cat((before, part))
            assert len(self._texts[span.slot]) == span.start + span.length, "texts grow at their ends"
        texts = [self._texts[span.slot] for span in spans]
        with torch.no_grad():
            if len(texts) == 1 or not self._may_share(texts):
                return torch.cat([self._of_batch([one]) for one in texts])
            return self._of_batches(texts)

    # inside

    def _may_share(self, texts: list[Tensor]) -> bool:
        ragged = len({len(one) for one in texts}) > 1
        if ragged not in self._together:
            by_length = sorted(texts, key=len)
            pair = [by_length[0], by_length[-1]]  # the most padding that there is
            shared, alone = self._of_batch(pair), torch.cat([self._of_batch([one]) for one in pair])
            apart = max(difference(a, b) for a, b in zip(shared, alone, strict=True))
            # NaN is for what chooses tokens to report.
            self._together[ragged] = not apart > self._of.run.closeness
        return self._together[ragged]

    def _of_batches(self, texts: list[Tensor]) -> Tensor:
        """In as many calls as keep their logits small; those of like lengths go together."""
        if self._of.takes_places:
            return self._of_batch(texts)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        longest = len(texts[order[-1]])
        rows = max(1, LOGITS_BYTES // (4 * longest * self._of.vocabulary))
        found: dict[int, Tensor] = {}
        for begin in range(0, len(order), rows):
            part = order[begin : begin + rows]
            found.update(zip(part, self._of_batch([texts[index] for index in part]), strict=True))
        return torch.stack([found[index] for index in range(len(texts))])

    def _of_batch(self, texts: list[Tensor]) -> Tensor:
        """fp32 [texts, vocabulary]: one call."""
        lengths = [len(one) for one in texts]
        batch = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
        last = torch.tensor(lengths, device=self.device) - 1
        mask = places = None
        if self._of.takes_mask and len(set(lengths)) > 1:
            mask = (torch.arange(batch.shape[1], device=self.device) <= last[:, None]).to(torch.int64)
        if self._of.takes_places:
            kept = sorted(set(lengths))
            places = torch.tensor(kept, device=self.device) - 1
            last = torch.tensor([kept.index(length) for length in lengths], device=self.device)
        logits = self._of.logits(batch, places, mask)
        if logits.shape[1] == 1:
            last = torch.zeros_like(last)
        return logits[torch.arange(len(texts), device=self.device), last].float()
