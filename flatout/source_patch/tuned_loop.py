"""What the tune knew of the loop, and what each of its choices gained: from the plan and the report beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

import libcst as cst

from flatout.decoding import decode
from flatout.levers.observed import Observed
from flatout.plan import Plan
from flatout.plan_choices import ChoiceValue
from flatout.private_details import with_home
from flatout.script.own_files import content_digest
from flatout.source_patch.result import Gain
from flatout.source_patch.source_file import SourceFile
from flatout.statistics import Comparison

NO_REPORT = "there is no report of the tune beside the plan"


@dataclass(frozen=True, kw_only=True)
class TunedLoop:
    """What trained when the plan was made; None or '' where nobody knows."""

    device: str = ""
    """'cpu' or 'cuda'."""
    trained: frozenset[str] | None = None
    """Classes of the modules that were called, with weights."""
    repeated_block: str = ""
    """The class of the blocks that repeat in the model."""
    optimizers: frozenset[str] | None = None
    """Their classes."""
    made_at: frozenset[str] | None = None
    """The lines that made them, as 'train.py:12'; None where one is not known."""
    digests: frozenset[str] = frozenset()
    """Of the files that were tuned: a line has its number only in these."""

    def made(self, file: SourceFile, call: cst.Call) -> bool | None:
        """Did the tuned run make an optimizer by this call? None: nobody knows."""
        if self.made_at is None or content_digest(file.content) not in self.digests:
            return None
        path, (first, last) = os.path.realpath(file.path), file.lines(call)
        places = (with_home(place).rpartition(":") for place in self.made_at)
        return any(
            first <= int(line) <= last and (path == name or path.endswith(os.sep + name)) for name, _, line in places
        )


@dataclass(frozen=True, kw_only=True)
class _Tried:
    outcome: str
    choices: Mapping[str, object]
    comparison: Mapping[str, object] | None = None


class TuneReport:
    """A report of `flatout tune`, if it is for this plan. obstacle: why it is not; then every gain is unknown."""

    def __init__(self, plan: Plan, document: Mapping[str, object] | None, obstacle: str = NO_REPORT) -> None:
        self._plan = plan
        self.obstacle = obstacle if document is None else _obstacle(plan, document)
        self._document: Mapping[str, object] = {} if document is None or self.obstacle else document

    def loop(self) -> TunedLoop:
        """From the report; without one, from the plan's own words."""
        device = (self._plan.loop or "").rpartition(" on ")[2]
        known = device if device in ("cpu", "cuda") else ""
        observed = self._document.get("observed")
        if not isinstance(observed, Mapping):
            return TunedLoop(device=known)
        seen = Observed.from_json(observed)
        made_at = frozenset(one.made_at for one in seen.optimizers)
        return TunedLoop(
            device=seen.device.partition(":")[0],
            trained=frozenset(one.kind for one in seen.modules if one.parameters),
            repeated_block=next((one.repeated_block for one in seen.modules if one.repeated_block), ""),
            optimizers=frozenset(one.kind for one in seen.optimizers),
            made_at=made_at if all(made_at) else None,
            digests=frozenset(one.partition(" ")[0] for one in self._plan.sources),
        )

    def gain(self, choice: str, value: ChoiceValue) -> Gain:
        """By the trial in which this choice was kept."""
        if self.obstacle:
            return Gain(comparison=None, reason=self.obstacle)
        trials = self._document.get("trials")
        for entry in reversed(trials if isinstance(trials, list) else []):
            tried = decode(_Tried, {name: entry.get(name) for name in ("outcome", "choices", "comparison")})
            if tried.outcome != "kept" or tried.choices.get(choice) != value:
                continue
            if tried.comparison is None:
                return Gain(comparison=None, reason="it was not timed by itself")
            others = tuple(name for name in tried.choices if name != choice)
            return Gain(comparison=_comparison(tried.comparison), together_with=others)
        return Gain(comparison=None, reason="the report has no trial in which it was kept")

    def total(self) -> Gain:
        """Of the whole plan, in new processes."""
        if self.obstacle:
            return Gain(comparison=None, reason=self.obstacle)
        found = self._document.get("speedup")
        if not isinstance(found, Mapping):
            return Gain(comparison=None, reason="the plan as a whole was not compared with the plain script")
        if self._document.get("plan") != self._plan.choices():
            return Gain(comparison=None, reason="the plan was changed after the tune")
        return Gain(comparison=_comparison(found))


def _comparison(data: Mapping[str, object]) -> Comparison:
    known = {one.name: data.get(one.name) for one in fields(Comparison)}
    return decode(Comparison, {**known, "high": math.inf if known["high"] is None else known["high"]})


def _obstacle(plan: Plan, document: Mapping[str, object]) -> str:
    """Why a report is not that of this plan; '' if it is."""
    machine, sources = document.get("machine"), document.get("sources")
    fingerprint = machine.get("fingerprint") if isinstance(machine, Mapping) else None
    if plan.machine_fingerprint is not None and fingerprint != plan.machine_fingerprint:
        return "the report beside the plan is of another machine"
    if isinstance(sources, list) and plan.sources and tuple(sources) != plan.sources:
        return "the report beside the plan is of another version of the script"
    planned = document.get("plan")
    if not isinstance(planned, Mapping) or not planned.items() >= plan.choices().items():
        return "the report beside the plan is of another plan"
    return ""
