"""One trial in which a script, and the processes that it starts to train in, are watched for some steps.

found = watched_trial(request, command, "profiled")
found.answer, found.ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.errors import TrialError
from flatout.script.entry import Target
from flatout.script.rank_answers import RankAnswer, RankWatch, names_text, write_settings
from flatout.script.trial.answers import Answer, TrialDied, TrialEnded, TrialFault, TrialHangs, TrialSettled
from flatout.script.trial.messages import Command
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup, terminal_size
from flatout.script.work_folder import work_folder
from flatout.units import format_seconds

PATIENCE_SECONDS = 1800.0
PROFILERS_LOG = "USDT:"

Watched = Literal["profiled", "followed"]
"""What is done to a script: its steps are profiled, or its memory is followed."""


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What to watch, for how many steps, and for how long at most."""

    target: Target
    steps: int
    patience_seconds: float = PATIENCE_SECONDS
    """Timeout of each trial, for a script that never steps or hangs."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialFound:
    """The result of the trial."""

    answer: Answer
    """Of the script's own process; None: the trial ended with the answers of those that it had started."""
    end: TrialEnded | None
    """None: the script was stopped after its steps."""
    ranks: tuple[RankAnswer, ...]
    """The first rank first."""
    rank_notes: tuple[str, ...]
    """What is missing of them, and why."""
    errors: str
    """What the script wrote to stderr."""

    @property
    def status(self) -> int | None:
        """The script's exit code where it ended by itself."""
        return self.end.status if self.end is not None else None

    @property
    def shown_errors(self) -> str:
        """For the user, where the script failed."""
        if self.end is None or not self.end.status:
            return ""
        return of_the_script(self.errors) + (f"{self.end.note}\n" if self.end.note else "")


def watched_trial(
    request: WatchRequest,
    command: Command,
    watched: Watched,
    *,
    shared: Sequence[Path] = (),
    stdin_file: Path | None = None,
    inherits_stdin: bool = False,
) -> TrialFound:
    """Run the script as a trial under this command. shared: folders to which it writes for real. stdin_file: what it
    reads; None: nothing, or where it inherits it what this process would read.

    Raises TrialError where neither the script nor a process that it started could be watched.
    """
    with work_folder() as folder, work_folder() as ranks:
        write_settings(ranks, {"command": command, "target": request.target.command})
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            shared=(ranks, *shared),
            isolation=request.isolation,
            allow_network=request.allow_network,
            stdin_file=stdin_file,
            inherits_stdin=inherits_stdin,
            terminal_size=terminal_size() if stdin_file is None else None,
            errors_apart=True,
        )
        watch = RankWatch(ranks)
        with TrialProcess(setup, label=command["do"]) as trial:
            answer, end = None, None
            try:
                answer, end = trial.watch({**command, "ranks": str(ranks)}, request.patience_seconds, watch.settled)
            except TrialSettled:
                pass
            except TrialError as error:
                if not watch.answers():
                    raise _explained(error, request, watched, trial.errors) from None
            answers = watch.answers()
            if not answers and watch.dead and end is None:
                raise _died(watch, watched, trial.errors)
            return TrialFound(
                answer=answer, end=end, ranks=tuple(answers), rank_notes=watch.notes(watched), errors=trial.errors
            )


def of_the_script(errors: str) -> str:
    """Without what torch's profiler logs of itself."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith(PROFILERS_LOG))


def patience_over(request: WatchRequest, watched: Watched, last_at: str = "") -> TrialError:
    """last_at: of a TrialHangs."""
    missing = "take the steps of a profile" if watched == "profiled" else f"reach {request.steps} steps"
    return TrialError(
        f"the script did not {missing} in {format_seconds(request.patience_seconds)}{last_at}",
        limit="that is the timeout",
        remedy="allow more with --patience 2h, or ask for fewer --steps, if it trains at all",
    )


def _died(ranks: RankWatch, watched: Watched, errors: str) -> TrialError:
    tail = of_the_script(errors).strip()
    return TrialError(
        f"{names_text(ranks.dead)}, which the script started to train in, died before being {watched}",
        limit="the others wait for it",
        remedy="find out why it dies, without Flatout" + (f"\n{tail}" if tail else ""),
    )


def _explained(error: TrialError, request: WatchRequest, watched: Watched, errors: str) -> TrialError:
    """The error in terms of the command, with the script's stderr; for a signal with a shell's exit code."""
    what, limit, remedy = error.what, error.limit, error.remedy
    if isinstance(error, TrialHangs):
        over = patience_over(request, watched, error.last_at)
        what, limit, remedy = over.what, over.limit, over.remedy
    elif isinstance(error, TrialFault):
        subject = "the script could not be profiled" if watched == "profiled" else "the memory could not be followed"
        what = f"{subject}: {what}"
    elif isinstance(error, TrialDied):
        what = (
            f"the script died of {error.signal_name}"
            if error.signal_name
            else (f"the script exited with code {error.code} without Python's normal shutdown")
        )
    tail = of_the_script(errors).strip() if isinstance(error, TrialHangs | TrialDied) else ""
    explained = TrialError(what, limit=limit, remedy=remedy + (f"\n{tail}" if tail else ""))
    if isinstance(error, TrialDied) and error.signal_name:
        explained.exit_code = 128 - error.code
    return explained
