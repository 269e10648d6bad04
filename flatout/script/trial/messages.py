"""The JSON messages between the parent of a trial and its process; see the package."""

from __future__ import annotations

from typing import Literal, TypedDict

from flatout.plan_choices import ChoiceValue


class Command(TypedDict, total=False):
    """One command; each uses some of these fields."""

    do: str
    levers: list[list[ChoiceValue]]
    """[name, value] of each choice."""
    settle: int
    steps: int
    suspended: bool
    deterministic: bool
    warm_up: int
    timed: int
    timed_seconds: float
    """Time more than `timed` steps until so much time has passed."""
    follow: bool
    """Does a step fit in that is followed operator by operator?"""
    trace: str
    """The file for a Chrome trace; '': none."""
    behaviour: bool
    """Is the script itself followed in the end? By default it is."""
    ranks: str
    """The folder for the answers of processes that the script starts to train in; '': they are not followed."""
    request: dict[str, object]
    """A NumericsRequest."""
    pid: int
    """Of a process that was forked from the one that is asked."""


class TrialConfig(TypedDict):
    """The settings of one process, in a file written by its parent."""

    target: list[str]
    """The script's command."""
    scratch: str
    shared: list[str]
    turns: str
    """The folder in which trials take turns; one of the shared."""
    isolation: Literal["auto", "overlay", "guard"]
    allow_network: bool
    parent: int
    """Its process id."""
    levers: str
    """Where they are declared: 'package.module:NAME'."""
    choices: list[list[ChoiceValue]]
    """Those that are on from the start."""
    command: Command | None
    """One that applies from the script's first line."""


class DeterminismAnswer(TypedDict):
    """Digests of the weights after some steps."""

    event: Literal["determinism"]
    ended: bool
    steps: int
    step_seconds: float | None
    weights: list[tuple[str, str]]
    """(name, digest)"""


class MemoryAnswer(TypedDict, total=False):
    """What holds the memory of some steps; of a script that never imported torch only the first three."""

    event: Literal["memory"]
    ended: bool
    peak_resident_bytes: int
    step_kind: str | None
    steps: int
    compiled: bool
    left_uncompiled: bool
    resident_bytes: list[int]
    use: dict[str, object]
    """A MemoryUse."""
    judged_steps: int
    leaks: list[dict[str, object]]  # the fields of a Leak
    collected: list[str]


class ProfileAnswer(TypedDict, total=False):
    """Where the time of some steps went; of a script that never imported torch only the first three."""

    event: Literal["profile"]
    ended: bool
    steps: int
    """Since the first recognized one."""
    step_kind: str | None
    profile: dict[str, object] | None
    """A Profile without ceilings; None: no step was timed or profiled."""
    observed: dict[str, object] | None
    behaviour: dict[str, object] | None
    tf32: bool
    has_trace: bool
