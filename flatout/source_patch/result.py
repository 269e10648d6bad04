"""What a source patch is: files with their hunks, what each change gains, and what no source can say."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flatout.plan_choices import ChoiceValue
from flatout.statistics import Comparison


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster a choice made a step in the tune."""

    comparison: Comparison | None
    """None: unknown; `reason` says why."""
    reason: str = ""
    together_with: tuple[str, ...] = ()
    """Choices that were tried at the same time, so that the gain is theirs too."""

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "comparison": self.comparison and self.comparison.to_json()}


@dataclass(frozen=True, kw_only=True)
class SourceChange:
    """A choice of the plan that the patch writes into the source."""

    choice: str
    value: ChoiceValue
    gain: Gain
    notes: tuple[str, ...] = ()
    """What of it is not exactly as under `flatout run`."""

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "gain": self.gain.to_json()}


@dataclass(frozen=True, kw_only=True)
class LeftToRun:
    """A choice of the plan that has no form in this source, and why."""

    choice: str
    value: ChoiceValue
    gain: Gain
    reason: str
    command: tuple[str, ...] = ()
    """Environment variables (NAME=VALUE) that do the same for plain Python; empty: only `flatout run` does it."""

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "gain": self.gain.to_json()}


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One part of a unified diff. Lines are bytes with their first sign (' ', '-', '+') and line end."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]
    choices: tuple[str, ...]
    """That ask for what changes here."""


@dataclass(frozen=True, kw_only=True)
class PatchedFile:
    """A changed file."""

    name: str
    """Relative to the folder in which the patch is applied."""
    hunks: tuple[Hunk, ...]
    content: bytes
    """The whole new content."""


@dataclass(frozen=True, kw_only=True)
class SourcePatch:
    """The choices of a plan as a patch of the script's source."""

    script: str
    folder: str
    """Where it is applied: the current folder as '', or another."""
    files: tuple[PatchedFile, ...]
    changes: tuple[SourceChange, ...]
    left: tuple[LeftToRun, ...]
    total: Gain
    """Of the whole plan, those that are left included."""
    machine: str | None
    torch_version: str | None
    warnings: tuple[str, ...] = ()
