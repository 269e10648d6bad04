"""Encoder-decoders of transformers (T5, BART and others), by their own forward pass and their own cache.

The encoder runs once for each source; texts that began together go on together, and leave the batch as they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.generation.own_forward import OwnForward, difference, logits_of, trial_tokens

TOKENS, CUT = 5, 3
REMEDY = "use the model's own generate()"


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


class EncoderDecoderSteps:
    """A model of transformers as a Stepper. UsageError for one whose sources are no tokens, or whose cache, or padded
    sources, give other logits than the whole forward pass."""

    encodes = True
    shares = True

    def __init__(self, run: OwnForward) -> None:
        self._run = run
        model = run.model
        name = getattr(model, "main_input_name", "input_ids")
        if name != "input_ids" or not hasattr(model, "get_encoder"):
            what = f"the {type(model).__name__} reads {name}"
            raise UsageError(what, limit="a source here is a text, or its token ids", remedy=REMEDY)
        single = torch.zeros(1, 1, dtype=torch.int64, device=run.device)
        self.vocabulary = self._whole(single, single).shape[-1]
        self._check()

    def begin(self, sources: Tensor, valid: Tensor) -> _Read:
        mask = valid.to(torch.int64)
        found = self._run.call("get_encoder()", input_ids=sources, attention_mask=mask)
        return _Read(hidden=found[0], mask=mask)

    def advance(self, tokens: Tensor, state: _Read) -> tuple[Tensor, _Read]:
        found = self._run(
            encoder_outputs=(state.hidden,),
            attention_mask=state.mask,
            decoder_input_ids=tokens,
            past_key_values=state.cache,
            use_cache=True,
        )
        return logits_of(found, tokens, self._run.model), _Read(state.hidden, state.mask, found.past_key_values)

    def of_rows(self, state: _Read, rows: list[int]) -> _Read:
        picked = torch.tensor(rows, device=state.hidden.device)
        if state.cache is not None:
            state.cache.batch_select_indices(picked)
        return _Read(state.hidden[picked], state.mask[picked], state.cache)

    def joined(self, states: Sequence[_Read]) -> None:
        """Never: their texts have other lengths."""

    # inside

    def _whole(self, source: Tensor, target: Tensor) -> Tensor:
        found = self._run(input_ids=source, decoder_input_ids=target, use_cache=False)
        return logits_of(found, target, self._run.model)

    def _check(self) -> None:
        """A short source beside a longer one, the target in two parts, against the whole forward pass of each."""
        model, device = self._run.model, self._run.device
        draw = [trial_tokens(model, self.vocabulary, TOKENS, seed).to(device)[None] for seed in (1, 2, 3, 4)]
        short, long, targets = draw[0][:, :CUT], draw[1], torch.cat(draw[2:])
        wanted = [self._whole(source, target[None]) for source, target in zip((short, long), targets, strict=True)]
        sources = torch.cat((nn.functional.pad(short, (0, TOKENS - CUT)), long))
        valid = torch.ones_like(sources, dtype=torch.bool)
        valid[0, CUT:] = False
        first, state = self.advance(targets[:, :CUT], self.begin(sources, valid))
        second, _ = self.advance(targets[:, CUT:], state)
        apart = difference(torch.cat((first, second), dim=1), torch.cat(wanted))
        most = self._run.closeness
        if apart > most:
            what = f"with its cache, the {type(model).__name__}'s logits differ by {apart:.1%} of their spread"
            raise UsageError(what, limit=f"{most:.1%} is allowed", remedy=REMEDY)
