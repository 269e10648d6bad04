"""Results of generation: the texts of all prompts with timings, or pieces of them as they are generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from flatout.notebook_tables import ShownAsText
from flatout.units import counted, format_rate, format_seconds

Reason = Literal["eos", "stop", "length", "context"]
"""Why a text ended: the model's end token, a stop of the user's, max_new_tokens, or the model's longest sequence."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one prompt's text gained."""

    prompt: int
    """Its number among the prompts given, from 0."""
    tokens: tuple[int, ...]
    """New ones; of an ended text without those that belong to what ended it."""
    text: str | None
    """What is certain of their text (never half a character, nor what a stop may yet take back); None: no tokenizer."""
    reason: Reason | None
    """Set in a prompt's last piece."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Time against what this machine needs at least."""

    of: str
    """The limit that binds: "memory bandwidth" or "matrix products in bf16"."""
    share: float | None
    """1 = at the ceiling; None = unknown."""
    why_unknown: str | None = None

    def __str__(self) -> str:
        return f"share unknown: {self.why_unknown}" if self.share is None else f"{self.share:.0%} of {self.of}"


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How guessing ahead went."""

    proposed: int
    accepted: int
    passes: int
    """Of the model, each over one or several tokens of a sequence."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(ShownAsText):
    """The new tokens of every prompt, in the order of the prompts."""

    tokens: list[list[int]]
    """Without end tokens and stops."""
    texts: list[str] | None
    """Of the new tokens; None without a tokenizer."""
    reasons: list[Reason]
    seed: int | None
    """With it the same texts come again; None: greedy, which needs none."""
    prompt_tokens: int
    generated_tokens: int
    """Ends and stops included: all that were made."""
    prefill_seconds: float
    """Reading prompts."""
    decode_seconds: float
    """Everything after: passes, choosing, stops."""
    prefill_share: Share
    decode_share: Share
    storage: str
    """How the weights were held (fp32, bf16, int8, int4), or in what numbers the model's own forward pass computes."""
    engine: str
    """What ran the passes, and why if that is not the fastest there is."""
    model_settings: Mapping[str, object]
    """What the model's generation_config changed, by name: settings that the caller did not give."""
    speculation: Speculation | None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all prompts over the time after reading them; None if there was nothing to measure."""
        first = len(self.tokens)  # a prompt's first token comes out of its reading
        later = self.generated_tokens - first
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None

    def to_json(self) -> Mapping[str, object]:
        """Everything as JSON types."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One line for people."""
        rate = self.tokens_per_second
        speed = "no time to measure" if rate is None else format_rate(rate, "tokens/s")
        parts = [
            f"{counted(self.generated_tokens, 'token')} for {counted(len(self.tokens), 'prompt')}",
            f"{speed} ({self.decode_share})",
            f"{counted(self.prompt_tokens, 'token')} of prompts in {format_seconds(self.prefill_seconds)} "
            f"({self.prefill_share})",
            f"weights {self.storage}, {self.engine}",
        ]
        if self.model_settings:
            taken = ", ".join(f"{name} {value}" for name, value in self.model_settings.items())
            parts.append(f"from the model's generation_config: {taken}")
        if self.speculation is not None and self.speculation.proposed:
            parts.append(f"guessed {self.speculation.proposed}, {self.speculation.accepted} right")
        return " · ".join(parts)
