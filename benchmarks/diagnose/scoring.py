"""What the findings of a document are worth: found or not, at which line, how much, and what was accused wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.diagnose.catalogue import SUBJECTS, Script
from flatout.statistics import median

LINES_READ = 3
"""Of a finding: a long list of lines names none."""
COST_TOLERANCE, STEP_TOLERANCE = 0.25, 0.02
"""A predicted cost is right within a quarter of the gain, or within 2 % of a step."""
LEAST_RECALL, MOST_FALSE_ALARMS, LEAST_LINES, LEAST_COSTS = 0.95, 0.02, 0.95, 0.80


PEER_AREAS = {
    "INPUT-BOUND": frozenset(["starved-loader", "per-sample-fetch", "worker-restart", "slow-transform", "disk-time"]),
    "RESIDUAL-HEAVY": frozenset(
        ["python-time", "plotting-time", "logging-time", "disk-time", "hidden-sync", "debug-mode"]
    ),
    "MEMORY CREEP": frozenset(["memory-leak", "graph-kept-by-logging"]),
}
"""The verdicts of TraceML that accuse a script, and the subjects that each of them covers."""


@dataclass(frozen=True, kw_only=True)
class SaidFinding:
    """The parts of a finding that are scored."""

    name: str
    severity: str
    cost_share: float | None
    """Of a step."""
    lines: tuple[tuple[str, int], ...]
    """(file, line)"""

    @property
    def accuses(self) -> bool:
        """A note about something else is no alarm."""
        return self.name in SUBJECTS or self.severity in ("warning", "unusable")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one script, asked once."""

    script: str
    found: bool | None
    """None: there is nothing to find."""
    exactly: bool | None
    """Found under the script's own subject, not only under a name that is accepted as well."""
    line_right: bool | None
    """None: nothing to find, or not found."""
    predicted_share: float | None
    alarms: tuple[str, ...]
    """Findings that accuse a healthy script, or a faulty one of something else."""


def read_findings(document: Mapping[str, Any]) -> tuple[SaidFinding, ...]:
    """Raises KeyError or TypeError if the document has no such list."""
    return tuple(
        SaidFinding(
            name=one["name"],
            severity=one["severity"],
            cost_share=one.get("cost_share"),
            lines=tuple((line[0], int(line[1])) for line in one.get("lines") or ()),
        )
        for one in document["findings"]
    )


def judge(script: Script, findings: Sequence[SaidFinding]) -> Outcome:
    if script.role != "faulty":
        alarms = tuple(one.name for one in findings if one.accuses)
        return Outcome(
            script=script.name, found=None, exactly=None, line_right=None, predicted_share=None, alarms=alarms
        )
    right = [one for one in findings if one.name in script.accepted]
    exact = [one for one in right if one.name == script.subject]
    shares = [one.cost_share for one in exact or right if one.cost_share is not None]
    return Outcome(
        script=script.name,
        found=bool(right),
        exactly=bool(exact),
        line_right=any(_names_line(script, one) for one in right) if right else None,
        predicted_share=max(shares, default=None),
        alarms=tuple(one.name for one in findings if one.accuses and one.name not in script.accepted | script.follows),
    )


def no_answer(script: Script) -> Outcome:
    """A command that ended without a document has found nothing, and left nobody in peace."""
    faulty = script.role == "faulty"
    return Outcome(
        script=script.name,
        found=False if faulty else None,
        exactly=False if faulty else None,
        line_right=None,
        predicted_share=None,
        alarms=() if faulty else ("no answer",),
    )


def _names_line(script: Script, finding: SaidFinding) -> bool:
    own = [line for file, line in finding.lines[:LINES_READ] if Path(file).name == script.path.name]
    return any(line in script.marked_lines for line in own)


def gain_share(faulty_seconds: Sequence[float], healthy_seconds: Sequence[float]) -> float:
    """The share of the faulty script's time that the fix saves, from neighbouring runs."""
    return median([1 - after / before for before, after in zip(faulty_seconds, healthy_seconds, strict=True)])


def cost_right(predicted_share: float | None, gain: float) -> bool:
    """Nothing predicted is wrong, however small the gain: that is counted by who asks."""
    if predicted_share is None:
        return False
    return abs(predicted_share - gain) <= max(COST_TOLERANCE * abs(gain), STEP_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How many of how many, with those that failed by name."""

    right: int
    of: int
    wrong: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        return self.right / self.of if self.of else None

    def to_json(self) -> dict[str, object]:
        return {"right": self.right, "of": self.of, "share": self.share, "wrong": list(self.wrong)}

    def __str__(self) -> str:
        return f"{self.right} of {self.of}" + (f" ({self.share:.1%})" if self.share is not None else "")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of several scripts; each counts once, however often it was asked: it is found if it was found every time."""

    recall: Rate
    exactly: Rate
    lines: Rate
    quiet: Rate
    """Healthy scripts without any alarm, in any run."""
    extra: Rate
    """Faulty scripts that were accused of nothing else."""
    costs: Rate
    costs_unknown: tuple[str, ...] = field(default=())
    """Faster when fixed, and found, but with no cost in the finding."""

    @property
    def reaches_goals(self) -> bool:
        shares = (self.recall.share, self.lines.share, self.quiet.share, self.costs.share)
        goals = (LEAST_RECALL, LEAST_LINES, 1 - MOST_FALSE_ALARMS, LEAST_COSTS)
        return all(share is None or share >= goal for share, goal in zip(shares, goals, strict=True))

    def to_json(self) -> dict[str, object]:
        rates = {name: getattr(self, name).to_json() for name in ("recall", "exactly", "lines", "quiet", "extra")}
        costs = {"costs": self.costs.to_json(), "costs_unknown": list(self.costs_unknown)}
        return {**rates, **costs, "reaches_goals": self.reaches_goals}


def score(outcomes: Mapping[str, Sequence[Outcome]], gains: Mapping[str, float]) -> Score:
    """Outcomes by name of the script; measured gains by name of the pair, of those that are faster when fixed."""
    faulty = {name: runs for name, runs in outcomes.items() if runs and runs[0].found is not None}
    healthy = {name: runs for name, runs in outcomes.items() if runs and runs[0].found is None}
    found = {name: runs for name, runs in faulty.items() if all(one.found for one in runs)}
    priced = {name: _predicted(runs) for name, runs in found.items() if name.rpartition("/")[0] in gains}
    return Score(
        recall=_rate(faulty, lambda runs: all(one.found for one in runs)),
        exactly=_rate(faulty, lambda runs: all(one.exactly for one in runs)),
        lines=_rate(found, lambda runs: all(one.line_right for one in runs)),
        quiet=_rate(healthy, lambda runs: not any(one.alarms for one in runs)),
        extra=_rate(faulty, lambda runs: not any(one.alarms for one in runs)),
        costs=_rate_of(
            {name: cost_right(share, gains[name.rpartition("/")[0]]) for name, share in priced.items()},
        ),
        costs_unknown=tuple(name for name, share in priced.items() if share is None),
    )


def _predicted(runs: Iterable[Outcome]) -> float | None:
    shares = [one.predicted_share for one in runs if one.predicted_share is not None]
    return median(shares) if shares else None


def _rate(outcomes: Mapping[str, Sequence[Outcome]], right: Any) -> Rate:
    return _rate_of({name: right(runs) for name, runs in outcomes.items()})


def _rate_of(right: Mapping[str, bool]) -> Rate:
    wrong = tuple(name for name, is_right in right.items() if not is_right)
    return Rate(right=len(right) - len(wrong), of=len(right), wrong=wrong)


@dataclass(frozen=True, kw_only=True)
class PeerScore:
    """Of one verdict for each script: the area is all that a verdict names, no line and no cost."""

    saw_steps: Rate
    right_area: Rate
    """Faulty scripts."""
    quiet: Rate
    """Healthy scripts."""

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name).to_json() for name in ("saw_steps", "right_area", "quiet")}


def score_peer(said: Mapping[str, tuple[Script, Mapping[str, Any]]]) -> PeerScore:
    """Of what the peer said about each script, by its name."""
    areas = {name: peer_area(words.get("verdict")) for name, (_, words) in said.items()}
    faulty = {name: script for name, (script, _) in said.items() if script.role == "faulty"}
    return PeerScore(
        saw_steps=_rate_of({name: bool(words.get("steps_found")) for name, (_, words) in said.items()}),
        right_area=_rate_of({name: bool(areas[name] & script.accepted) for name, script in faulty.items()}),
        quiet=_rate_of({name: not areas[name] for name in said if name not in faulty}),
    )


def peer_area(verdict: str | None) -> frozenset[str]:
    """The subjects that a verdict covers; none if it accuses nothing."""
    plain = (verdict or "").upper().replace("_", "-").replace("CREEP-CONFIRMED", "MEMORY CREEP")
    return frozenset().union(*(subjects for word, subjects in PEER_AREAS.items() if word in plain))
