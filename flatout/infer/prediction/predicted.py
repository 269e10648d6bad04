"""What prediction returns besides results: failed inputs, and the figures of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flatout.errors import FlatoutError, UsageError, describe_error


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Stands in the place of a result: this input could not be used, or its result is not finite."""

    index: int
    what: str
    limit: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"input {self.index}: {'; '.join(part for part in (self.what, self.limit, self.remedy) if part)}"

    def error(self, prefix: str) -> UsageError:
        """For where it ends the run."""
        return UsageError(f"{prefix}: {self.what}", limit=self.limit, remedy=self.remedy)

    @classmethod
    def by(cls, index: int, error: BaseException) -> Failed:
        """From the error that says why."""
        if isinstance(error, FlatoutError):
            return cls(index=index, what=error.what, limit=error.limit, remedy=error.remedy)
        return cls(index=index, what=describe_error(error))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was done so far. Tokens of inputs of fixed size are the inputs themselves."""

    items: int
    """Inputs that were read, the failed ones included."""
    failed: int
    tokens: int
    """Real tokens that the model ran on."""
    sequences: bool = True
    """Were there any, or only inputs of fixed size and vectors of numbers?"""
    computed_tokens: int
    """The same with padding, of which packed rows have at most one token in 32 (in their repeated blocks)."""
    batches: Mapping[str, int]
    """How many batches were packed, equal or padded."""
    seconds: float
    """Spent on reading, batching and running, trying out what the model allows included; not in the caller's loop."""
    flops: float | None
    """Operations on real tokens; None where none could be counted."""
    ceiling_flops_per_second: float | None
    """The fastest matrix product measured on this machine in `ceiling_dtype`; None if none was measured."""
    ceiling_dtype: str
    splits: int
    """Batches that did not fit into the memory and were run in parts."""
    graphs: int | None
    """Versions of the model that were compiled; None where none was asked for."""
    notes: tuple[str, ...]
    """What was done to the model, and what the plan asks for but could not be done, with the reason."""

    @property
    def padding_share(self) -> float:
        """Of the tokens computed."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def items_per_second(self) -> float | None:
        return self.items / self.seconds if self.seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """None where the inputs are no sequences."""
        return self.tokens / self.seconds if self.seconds and self.sequences else None

    @property
    def share_of_ceiling(self) -> float | None:
        """Operations on real tokens over what the ceiling allows in that time; None where one of the two is unknown."""
        if self.flops is None or self.ceiling_flops_per_second is None or not self.seconds:
            return None
        return self.flops / self.seconds / self.ceiling_flops_per_second

    def in_short(self) -> str:
        """A few words for a progress bar."""
        parts = []
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        elif self.items_per_second is not None:
            parts.append(f"{self.items_per_second:,.1f} inputs/s")
        if self.share_of_ceiling is not None:
            parts.append(f"{self.share_of_ceiling:.0%} of the {self.ceiling_dtype} ceiling")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return " · ".join(parts)

    def to_json(self) -> dict[str, object]:
        derived = ("padding_share", "items_per_second", "tokens_per_second", "share_of_ceiling")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
