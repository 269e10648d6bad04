"""The sequences of one pass on the device: what chooses their next tokens without asking the host.

A new one is made whenever the sequences change; between that, tokens flow from pass to pass on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.infer.generation.sampling import Sampling, Uniforms, adjusted, next_tokens, unusable


class Rows:
    """`texts`: each row's tokens so far, prompt first. `made`: how many of them were generated."""

    def __init__(
        self,
        sampling: Sampling,
        texts: Sequence[Sequence[int]],
        made: Sequence[int],
        uniforms: Sequence[Uniforms | None],
        *,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._sampling = sampling
        self._history: Tensor | None = None
        if sampling.adjusts:
            width = max(len(text) for text in texts) + ahead
            padded = [[*text, *([0] * (width - len(text)))] for text in texts]
            self._history = torch.tensor(padded, device=device)
            self._lengths = torch.tensor([len(text) for text in texts], device=device)
        self._draws: Tensor | None = None
        if not sampling.greedy:
            rows = [one.draws[0, start : start + ahead] for one, start in zip(uniforms, made, strict=True) if one]
            self._draws = torch.stack(rows).to(device)
        self._step = 0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [rows, vocabulary] -> the next tokens, int64 [rows], and which rows' logits could not be used, bool."""
        if self._history is not None:
            logits = adjusted(logits, self._sampling, self._history, self._lengths)
        uniforms = None if self._draws is None else self._draws[:, self._step]
        tokens = next_tokens(logits, self._sampling, uniforms)
        if self._history is not None:
            self._history.scatter_(1, self._lengths[:, None], tokens[:, None])
            self._lengths = self._lengths + 1
        self._step += 1
        return tokens, unusable(logits, tokens if self._sampling.greedy else None)
