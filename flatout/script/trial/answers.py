"""What the parent of a trial gets: figures, or an exception that says why there are none."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flatout.errors import ScriptError, TrialError
from flatout.units import counted, format_seconds

Answer: TypeAlias = Any
"""JSON, as the process of a trial writes it."""

FEWEST_TO_PROVE = 2
"""Steps with levers on: an error of a lever in its first step (a stale copy, a lost update) shows in a second."""

MORE_STEPS = "let it run more steps while it is tuned, by its own options (more epochs, smaller batches)"
"""The remedy for a script that is too short."""
LONGER = "let it run longer, by its own options (more epochs)"
"""The same for one that is only watched."""

PEAK_STEPS = 2
"""Followed for a peak: more than one, as the last step of an epoch may have a smaller batch."""


WANTS_RANKS = re.compile(
    r"environment variable (RANK|WORLD_SIZE|MASTER_\w+) expected|KeyError: '(LOCAL_)?RANK'|WORLD_SIZE"
)
"""An error of a script that reads what a launcher would have set."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window of steps under one set of levers."""

    seconds: tuple[float, ...]
    settle_seconds: tuple[float, ...]
    apply_seconds: float
    resident_bytes: int
    peak_resident_bytes: int | None = None
    """Of the process so far; None: it is not the arm's own."""
    rolled_back: dict[str, str] = field(default_factory=dict)
    """Lever name -> why it was rolled back in the process."""
    samples: tuple[int | None, ...] = ()
    """Samples that each step drew from the script's loader; None: not counted."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak memory of a few steps."""

    peak_bytes: int | None
    """Of tensors (CPU) or of torch's allocator (CUDA); None: it could not be measured."""
    resident_bytes: int
    """Peak resident memory of the process on the host."""
    incidents: dict[str, str] = field(default_factory=dict)
    """Lever name -> what it reverted by itself, and why."""


def most_of(peaks: Sequence[int | None]) -> int | None:
    """The maximum; None where one of them is unknown."""
    known = [peak for peak in peaks if peak is not None]
    return max(known) if len(known) == len(peaks) else None


class TrialEnded(TrialError):
    """The script ended (with `status` and `error`), so there are no more steps.

    `steps` counts from the first recognized one, after which a trial takes commands; `script_steps`: the script's own,
    some of which may have passed before that; None: the same. `note` says what about the trial's environment may have
    made it fail; '' where that is unknown. `last_line`: of what it printed, as the reason that it gives to sys.exit.
    """

    def __init__(
        self,
        status: int,
        error: str,
        steps: int,
        note: str = "",
        *,
        script_steps: int | None = None,
        last_line: str = "",
    ) -> None:
        self.status, self.error, self.steps, self.note = status, error, steps, note
        self.last_line = last_line
        self.script_steps = steps if script_steps is None else script_steps
        super().__init__(f"the script ended with code {status} after {steps} steps")

    @property
    def by_itself(self) -> bool:
        """Did it come to its end? A script may end with any exit code; one that fails raises, or is killed."""
        return self.status == 0 or (self.status > 0 and not self.error.strip())

    @property
    def leaves_enough_steps(self) -> bool:
        """Can the script be tuned by restarting it?"""
        return self.by_itself and self.steps > FEWEST_TO_PROVE

    @property
    def headline(self) -> str:
        """The exception in one line, without the rest of its message; '' where there was none."""
        lines = [line for line in self.error.strip().splitlines() if line.strip()]
        begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        after = lines[begins[-1] + 1 :] if begins else []
        return next((line for line in after if not line.startswith(" ")), lines[-1] if lines else "")


class TrialStopped(TrialError):
    """The trial was stopped before the script's first write, as nothing else protects the user's files here."""


class TrialHangs(TrialError):
    """The process was silent for so long that it counts as hanging."""

    def __init__(self, seconds: float, location: str = "") -> None:
        """location: where the script is, as 'train.py:92 in evaluate'; '' where that is unknown."""
        self.seconds, self.location = seconds, location
        at = f" at {location}" if location else ""
        super().__init__(f"no step for {seconds:.0f} s: it hangs{at}")

    @property
    def last_at(self) -> str:
        """For the end of a statement; '' where the location is unknown."""
        return f"; last at {self.location}" if self.location else ""


def no_step_within(hang: TrialHangs, name: str) -> TrialError:
    """Error for a script that had not taken its next step when the patience that the user gave it was over."""
    return TrialError(
        f"{name}: no step in {format_seconds(hang.seconds)}{hang.last_at}",
        limit="that is the timeout",
        remedy="allow more with --patience 2h, if it trains at all",
    )


class TrialSettled(TrialError):
    """What the parent wanted of the processes that the script has started is there."""


class TrialFault(TrialError):
    """An error of ours in the process, not the script's."""


class TrialDied(TrialError):
    """The process ended without an answer. `code`: its exit code, or minus the signal number."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(
            f"the process died of {self.signal_name}"
            if self.signal_name
            else f"the process exited with code {code} in the middle of a step"
        )

    @property
    def signal_name(self) -> str:
        """'SIGKILL (out of memory?)'; '' where it exited by itself."""
        if self.code >= 0:
            return ""
        try:
            name = signal.Signals(-self.code).name
        except ValueError:  # a real-time signal has none
            return f"signal {-self.code}"
        return name + (" (out of memory?)" if name == "SIGKILL" else "")


def explain_stop(stop: TrialStopped, name: str, reason: str) -> ScriptError:
    """Error for a script that may not write in a trial; `reason`: why there is no copy-on-write."""
    limit = "copy-on-write is refused here, so a trial may not go on"
    return ScriptError(f"{name}: {stop}", limit=limit, remedy=reason)


def explain_end(end: TrialEnded, name: str, *, levers: bool = False, needed: str = "") -> ScriptError:
    """Error for a script that ended before what was wanted of it was seen. levers: are any tried, later on? needed: for
    what it was to go on; '': for a tune."""
    alone = ", without any lever" if levers else ""
    lines = [line for line in end.error.strip().splitlines() if line.strip()]
    if end.status != 0 and lines:
        trace = "\n" + "\n".join(lines) if len(lines) > 1 else ""
        note = f"\n{end.note}" if end.note else ""
        if levers and WANTS_RANKS.search(end.headline):
            note += f"\nit is started in ranks, as by torchrun: flatout tune --nproc-per-node 2 {name}"
        return ScriptError(f"{name} failed by itself{alone}: {end.headline}{trace}{note}")
    if end.status != 0:
        return _exited(end, name, alone, None if not levers and not needed else needed)
    if end.steps == 0:
        return ScriptError(
            f"{name} ended without a single step",
            limit="a step is an optimizer step, or a backward pass followed by a change of the weights; other threads "
            "and gradients of torch.func are not followed",
            remedy="training in processes that the script starts, as by mp.spawn, is not followed here"
            + ": flatout tune --own-ranks 2 (own_ranks=2)" * levers,
        )
    how = f" ({end.note})" if end.note else ""
    return ScriptError(
        f"{name} ended after {counted(end.script_steps, 'step')}{how}",
        limit=_too_short(end, needed),
        remedy=LONGER if needed else MORE_STEPS,
    )


def _exited(end: TrialEnded, name: str, alone: str, needed: str | None) -> ScriptError:
    """Error for a script that ended by itself with another exit code than 0, and no exception. needed: as in
    `explain_end`; None: nobody knows how many steps it should have."""
    plain = f"see what it says without Flatout: python {name}"
    if end.script_steps == 0:
        said = f": {end.last_line}" if end.last_line else ""
        return ScriptError(f"{name} exited with code {end.status} before its first step{alone}{said}", remedy=plain)
    said = f", and the last line that it printed is {end.last_line!r}" if end.last_line else ""
    return ScriptError(
        f"{name} exited with code {end.status} after {counted(end.script_steps, 'step')}{alone}{said}",
        limit="" if needed is None else _too_short(end, needed),
        remedy=f"if that code is no failure, {LONGER if needed else MORE_STEPS}; else {plain}",
    )


def _too_short(end: TrialEnded, needed: str) -> str:
    """Why it has too few steps."""
    if needed:
        return needed
    if end.leaves_enough_steps:
        return "it had more in the run before: the number of steps must stay the same while it is tuned"
    return (
        f"flatout run turns levers on after a script's first step, and a proof needs {FEWEST_TO_PROVE} steps with "
        "them, the second continuing from the first"
    )
