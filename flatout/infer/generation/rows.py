"""The sequences of one pass on the device: what chooses their next tokens without asking the host.

A new one is made whenever the sequences change; between that, tokens flow from pass to pass on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.infer.generation.sampling import Sampling, Uniforms, adjusted, next_tokens, unusable
from flatout.infer.generation.token_rules import Place, TokenRules


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How next tokens are chosen, the same for all texts of a run."""

    sampling: Sampling
    rules: TokenRules

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on more than the logits, so that `adjusted` needs to know the texts."""
        return self.sampling.adjusts or self.rules.any

    def adjusted(self, logits: Tensor, place: Place) -> Tensor:
        """The logits that the choice is made from; see `sampling.adjusted` and `TokenRules`."""
        logits = adjusted(logits, self.sampling, place.history, place.lengths)
        return self.rules.applied(logits, place) if self.rules.any else logits


def place_of(
    texts: Sequence[Sequence[int]],
    prompts: Sequence[int],
    limits: Sequence[int],
    *,
    device: torch.device,
    ahead: int = 0,
) -> Place:
    """Of rows with these texts so far, prompts of so many tokens and limits, with room for `ahead` more tokens."""
    width = max(len(text) for text in texts) + ahead
    padded = [[*text, *([0] * (width - len(text)))] for text in texts]
    numbers = [[len(text) for text in texts], prompts, limits]
    lengths, of_prompts, of_limits = (torch.tensor(one, device=device) for one in numbers)
    history = torch.tensor(padded, device=device)
    return Place(history=history, lengths=lengths, prompts=of_prompts, limits=of_limits)


class Rows:
    """`place`: where the rows stand, if the choice looks back. `made`: how many tokens of each were generated."""

    def __init__(
        self,
        choice: Choice,
        place: Place | None,
        made: Sequence[int],
        uniforms: Sequence[Uniforms | None],
        *,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._choice, self._place = choice, place
        self._draws: Tensor | None = None
        if not choice.sampling.greedy:
            rows = [one.draws[0, start : start + ahead] for one, start in zip(uniforms, made, strict=True) if one]
            self._draws = torch.stack(rows).to(device)
        self._step = 0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [rows, vocabulary] -> the next tokens, int64 [rows], and which rows' logits could not be used, bool."""
        sampling = self._choice.sampling
        if self._place is not None:
            logits = self._choice.adjusted(logits, self._place)
        uniforms = None if self._draws is None else self._draws[:, self._step]
        tokens = next_tokens(logits, sampling, uniforms)
        if self._place is not None:
            self._place = self._place.after(tokens)
        self._step += 1
        return tokens, unusable(logits, tokens if sampling.greedy else None)
