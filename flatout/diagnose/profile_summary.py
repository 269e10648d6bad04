"""What is known of a profiled script: the trial's result, the profile with ceilings, the findings."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.diagnose.finding import Finding
from flatout.machine.description import Machine
from flatout.profiling.profile import Profile
from flatout.script.profile_trial import ProfileWatched


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """What `flatout profile` found of a script."""

    watched: ProfileWatched
    profile: Profile | None
    """With ceilings, as far as they are known."""
    machine: Machine
    findings: tuple[Finding, ...] | None = None
    """None: no checks were made."""
