"""`flatout profile --devices`: a script for one device on several, as a trial in which each rank is profiled.

watched = profile_on_devices(request, 2, settings)
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from flatout.errors import TrialError, UsageError
from flatout.script.child_command import child_command
from flatout.script.profile_trial import (
    TRACE_NAME,
    ProfileRequest,
    ProfileWatched,
    Schedule,
    command_of,
    watch_with,
    watched_of,
)
from flatout.script.rank_answers import RankWatch, write_settings
from flatout.script.replicas.settings import ERRORS, LATE, Settings
from flatout.script.replicas.starting import QUIET, ranks_prepared, start_ranks
from flatout.script.watched_trial import of_the_script, patience_over
from flatout.script.work_folder import work_folder

MOST_ERROR_BYTES = 20_000
NO_BEHAVIOUR = "what the script itself does was not followed on several devices: flatout profile without --devices does"


def profile_on_devices(request: ProfileRequest, devices: int, settings: Settings) -> ProfileWatched:
    """A second time, with fewer steps, where the script ends before the profile does.

    Raises TrialError where the script fails, or takes too few steps, and what a rank raises that refuses to go on.
    """
    request.target.check()
    settings = replace(settings, is_trial=True)
    return watch_with(request, lambda schedule: _once(request, devices, settings, schedule))


def _once(request: ProfileRequest, devices: int, settings: Settings, schedule: Schedule) -> ProfileWatched:
    trace = request.trace_folder / TRACE_NAME if request.trace_folder is not None else None
    shared = [] if request.trace_folder is None else [request.trace_folder]
    with work_folder() as answers, ranks_prepared(settings, answers, *shared) as folder:
        command = command_of(schedule, trace) | {"behaviour": False}
        write_settings(answers, {"command": command, "target": request.target.command})
        words = [str(folder), str(answers), str(request.patience_seconds), *request.target.command]
        start = child_command("flatout.script.replicas.profiled", *words)
        watch, refusal, status = RankWatch(answers), None, 0
        try:
            status = start_ranks(start, devices, folder, variables=QUIET)
        except UsageError as error:
            refusal = error
        watch.settled()
        found = watch.answers()
        if not found:
            if (answers / LATE).exists():
                raise patience_over(request, "profiled")
            raise refusal or _failed(request, status, devices, answers)
        notes = watch.notes("profiled")
    watched = watched_of(request, None, found, trace=trace)
    return replace(watched, devices=devices, rank_notes=(*notes, NO_BEHAVIOUR))


def _failed(request: ProfileRequest, status: int, devices: int, answers: Path) -> TrialError:
    tail = next((text for path in sorted(answers.glob(f"{ERRORS}*.log")) if (text := _read(path))), "")
    return TrialError(
        f"the script on {devices} devices ended with status {status}, before a rank was profiled",
        remedy=f"try it: flatout run --devices {devices} {shlex.join(request.target.command)}" + f"\n{tail}".rstrip(),
    )


def _read(path: Path) -> str:
    """What the script wrote."""
    return of_the_script(path.read_bytes()[-MOST_ERROR_BYTES:].decode(errors="replace")).strip()
