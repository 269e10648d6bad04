"""What the parent of a trial gets: figures, or an exception that says why there are none."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from flatout.errors import ScriptError, TrialError

FEWEST_TO_PROVE = 2
"""Steps with levers on: what a lever spoils in its first (a stale copy, a lost update) shows in a second."""

PEAK_STEPS = 2
"""Followed one after the other for a peak: the last step of an epoch, with a shorter batch, holds less than others."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window of steps under one set of levers."""

    seconds: tuple[float, ...]
    settle_seconds: tuple[float, ...]
    apply_seconds: float
    resident_bytes: int
    rolled_back: dict[str, str] = field(default_factory=dict)
    """Lever name -> why it was taken back inside the process."""
    samples: tuple[int | None, ...] = ()
    """That each step drew from the script's loader; None where nobody counts."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a few steps held."""

    peak_bytes: int | None
    """Of tensors (CPU) or of torch's allocator (CUDA); None: it could not be told."""
    resident_bytes: int
    """The most that the process ever had of the host's memory."""
    incidents: dict[str, str] = field(default_factory=dict)
    """Lever name -> what it took back by itself, and why."""


def most_of(peaks: Sequence[int | None]) -> int | None:
    """None where one of them could not be told."""
    known = [peak for peak in peaks if peak is not None]
    return max(known) if len(known) == len(peaks) else None


class TrialEnded(TrialError):
    """The script came to its end (with `status` and `error`), so the process has no more steps to give.

    `steps` counts from the first certain one, after which a trial takes commands; `script_steps`: the script's own, of
    which some may have passed before it was certain what a step is; None: as many. `note` says what of a trial's
    surroundings may have made it fail; '' where that is not known.
    """

    def __init__(self, status: int, error: str, steps: int, note: str = "", *, script_steps: int | None = None) -> None:
        self.status, self.error, self.steps, self.note = status, error, steps, note
        self.script_steps = steps if script_steps is None else script_steps
        super().__init__(f"the script ended with code {status} after {steps} steps")

    @property
    def leaves_enough_steps(self) -> bool:
        """Can the script be tuned by starting it again?"""
        return self.status == 0 and self.steps > FEWEST_TO_PROVE

    @property
    def headline(self) -> str:
        """The exception in one line, without the rest of a long message; '' where there was none."""
        lines = [line for line in self.error.strip().splitlines() if line.strip()]
        begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        after = lines[begins[-1] + 1 :] if begins else []
        return next((line for line in after if not line.startswith(" ")), lines[-1] if lines else "")


class TrialStopped(TrialError):
    """The trial was stopped before the script's first write, because nothing else protects the user's files here."""


class TrialHangs(TrialError):
    """Nothing came from the process for so long that it counts as hanging."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"no step for {seconds:.0f} s: it hangs")


class TrialFault(TrialError):
    """An error of ours in the process, and not the script's."""


class TrialDied(TrialError):
    """The process is gone, and said nothing. `code`: its exit code, or the number of the signal below 0."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(
            f"the process died of {self.signal_name}"
            if self.signal_name
            else f"the process left with code {code} in the middle of a step"
        )

    @property
    def signal_name(self) -> str:
        """'SIGKILL (out of memory?)'; '' where it left by itself."""
        if self.code >= 0:
            return ""
        name = signal.Signals(-self.code).name
        return name + (" (out of memory?)" if name == "SIGKILL" else "")


def explain_stop(stop: TrialStopped, name: str, reason: str) -> ScriptError:
    """What to tell a person whose script may not write in a trial; `reason`: why it cannot be given copies of files."""
    limit = "copy-on-write is refused here, so a trial may not go on"
    return ScriptError(f"{name}: {stop}", limit=limit, remedy=reason)


def explain_end(end: TrialEnded, name: str) -> ScriptError:
    """What to tell a person whose script ended before it could be tuned."""
    lines = [line for line in end.error.strip().splitlines() if line.strip()]
    if end.status != 0 and lines:
        trace = "\n" + "\n".join(lines) if len(lines) > 1 else ""
        note = f"\n{end.note}" if end.note else ""
        return ScriptError(f"{name} failed by itself, without any lever: {end.headline}", remedy=trace + note)
    if end.status != 0:
        return ScriptError(f"{name} left with code {end.status} after {end.steps} steps, without any lever")
    if end.steps == 0:
        return ScriptError(
            f"{name} never trains: it ended without a single step",
            limit="a step is an optimizer's step, or a backward pass followed by a change of the weights",
            remedy="if it trains in processes that it starts, Flatout does not follow it there",
        )
    limit = "it had more in the run before: while it is tuned, their number has to stay the same"
    if not end.leaves_enough_steps:
        limit = (
            f"flatout run turns levers on after a script's first step, and a proof needs {FEWEST_TO_PROVE} steps with "
            "them: one, and another that goes on from what the first has left"
        )
    return ScriptError(
        f"{name} ended after {end.script_steps} step{'s' * (end.script_steps != 1)}",
        limit=limit,
        remedy="let it make more while it is tuned, with its own options (more epochs, smaller batches)",
    )
