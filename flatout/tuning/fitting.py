"""Levers that save memory: which of them a search keeps although they make nothing faster.

By itself such a lever is kept where it was asked for (a plan being verified names it) or where memory is short.
Otherwise it is dropped, and the report shows the saving and the plan line that asks for it.

To bring the steps of a script under a limit (`flatout tune --fit 12GiB train.py`), they are tried alone and together,
each combination on two steps whose peak is measured. The fastest that fits is kept, and the search for faster steps
goes on from there, as long as they still fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.errors import ScriptError, TrialError
from flatout.levers.lever import Choice, Lever, split_by_switch
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan_choices import ChoiceValue, Exactness, allowed, contradiction, worst
from flatout.plan_document import line
from flatout.script.trial.answers import Peak, TrialEnded
from flatout.search.trial import Outcome, Trial
from flatout.statistics import median
from flatout.tuning.short_budget import MORE_TIME
from flatout.tuning.trials import RunningTrial, Trials, once_more_if_ended
from flatout.tuning.windows import Pace
from flatout.units import format_bytes

SMALLEST_SHARE = 0.05
"""Of a step's peak: the least saving for which a lever is kept."""
SHORT_SHARE = 0.85
"""Of all memory: beyond this, memory is short."""


def judge_gain(
    before: Peak, after: Peak, choice: Choice, machine: Machine, device: str, *, asked: bool
) -> tuple[Outcome, str]:
    """(outcome, reason) of a choice that is not faster; before, after: the peaks of two steps, without and with it."""
    if choice.lever.name in after.incidents:
        return "dropped", after.incidents[choice.lever.name]
    if before.peak_bytes and after.peak_bytes is not None and 1 - after.peak_bytes / before.peak_bytes < SMALLEST_SHARE:
        return "dropped", "saves hardly any memory"
    if asked:
        return "kept", "asked for, to save memory"
    if shortage := _shortage(before, machine, device):
        return "kept", shortage
    return "dropped", f"not faster; to save memory, put {line(choice.field, choice.value)} under [plan]"


def _shortage(plain: Peak, machine: Machine, device: str) -> str:
    """Why memory counts as short; '' where it does not, or that is unknown."""
    if device.startswith("cuda"):
        gpu = machine.gpu(device)
        total, held = gpu.memory_total_bytes if gpu is not None else None, plain.peak_bytes
    else:
        total, held = machine.memory_total_bytes, plain.resident_bytes
    if not total or held is None or held < SHORT_SHARE * total:
        return ""
    return f"memory is short: {format_bytes(held)} of {format_bytes(total)} are taken without it"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The peak memory of one step's tensors, against the given limit."""

    limit_bytes: int
    plain_bytes: int
    fitting: tuple[tuple[Choice, ...], ...] = ()
    """Combinations under the limit, fastest first; none where the plain script is under it."""
    trials: tuple[Trial, ...] = ()
    planned_bytes: int | None = None
    """Of a new process with the whole plan; None: not measured yet."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The combination to keep."""
        return self.fitting[0] if self.fitting else ()

    def without(self, failed: Choice) -> Fit:
        """The same without the combinations that need this choice, which failed its proof."""
        return replace(
            self, fitting=tuple(one for one in self.fitting if failed.choices not in [c.choices for c in one])
        )

    @property
    def holds(self) -> bool:
        return self.planned_bytes is not None and self.planned_bytes <= self.limit_bytes


def combinations(
    levers: Sequence[Lever], machine: Machine, observed: Observed, exactness: Exactness
) -> list[tuple[Choice, ...]]:
    """Combinations of levers that save memory here, one value of each: the smallest first, and among equals those
    that compile last. A GPU's activations are either offloaded or recomputed, not both."""
    offered: list[list[tuple[Choice, ...]]] = []
    for lever in levers:
        if lever.switch == "live" and saves_memory(lever) and allowed(lever.exactness, exactness):
            values = lever.applies(machine, observed).values
            offered.append([(), *((Choice(lever, value),) for value in values)])
    found = [tuple(itertools.chain(*parts)) for parts in itertools.product(*offered)]
    together = (one for one in found if one and _go_together({choice.field: choice.value for choice in one}))
    return sorted(together, key=lambda one: (len(one), any(choice.lever.compiles for choice in one)))


def _go_together(choices: Mapping[str, ChoiceValue]) -> bool:
    return not {"activation_checkpointing", "activation_offload"} <= choices.keys() and contradiction(choices) is None


def saves_memory(lever: Lever) -> bool:
    return lever.aim == "memory" or lever.halves_activations


def fit(
    process: Callable[[], RunningTrial],
    offered: Sequence[tuple[Choice, ...]],
    limit_bytes: int,
    step_seconds: float,
    has_time: Callable[[], bool],
    progress: Callable[[str], None],
) -> Fit:
    """The fastest of these combinations under the limit.

    process: returns a live trial: the same one or, where that has ended, a new one. has_time: is there time for another
    combination?
    Raises ScriptError where the plain step's memory cannot be measured, and where nothing offered fits.
    """
    plain = once_more_if_ended(process, lambda running: running.peak([])).peak_bytes
    if plain is None:
        raise ScriptError("the memory of a step cannot be measured here", remedy="tune without a memory limit (fit)")
    if plain <= limit_bytes:
        return Fit(limit_bytes=limit_bytes, plain_bytes=plain)
    tried: list[tuple[tuple[Choice, ...], Trial]] = []
    useless: set[Choice] = set()
    in_time = True
    for choices in offered:
        if useless & set(choices) or any(_only_saves_more(choices, fewer) for fewer, one in tried if _fits(one)):
            continue
        in_time = has_time()
        if not in_time:
            break
        trial = _tried(process, choices, plain, limit_bytes, step_seconds, progress)
        tried.append((choices, trial))
        if trial.candidate_peak_bytes is None and len(choices) == 1:  # it failed, or reverted itself
            useless |= {*choices}
    fitting = sorted((one for one in tried if _fits(one[1])), key=lambda one: one[1].candidate_seconds or 0.0)
    if not fitting:
        raise _too_large(plain, limit_bytes, [trial for _, trial in tried], len(offered), in_time)
    return Fit(
        limit_bytes=limit_bytes,
        plain_bytes=plain,
        fitting=tuple(choices for choices, _ in fitting),
        trials=tuple(_with_outcome(trial, fitting[0][1]) for _, trial in tried),
    )


def _fits(trial: Trial) -> bool:
    """Only what does is timed."""
    return trial.candidate_seconds is not None


def _only_saves_more(choices: Sequence[Choice], fewer: Sequence[Choice]) -> bool:
    """Do they add only memory savings to a combination that fits already?"""
    added = [choice for choice in choices if choice not in fewer]
    return set(fewer) <= set(choices) and all(choice.lever.aim == "memory" for choice in added)


def _tried(
    process: Callable[[], RunningTrial],
    choices: tuple[Choice, ...],
    plain_bytes: int,
    limit_bytes: int,
    step_seconds: float,
    progress: Callable[[str], None],
) -> Trial:
    trial = Trial(
        label=" + ".join(choice.label for choice in choices),
        choices={choice.field: choice.value for choice in choices},
        exactness=worst(choice.exactness for choice in choices),
        outcome="dropped",
        reason="too large",
    )
    progress(f"measuring the memory of a step with {trial.label}")

    def measured(running: RunningTrial) -> Trial:
        peak = running.peak(choices)
        reverted = [why for choice in choices if (why := peak.incidents.get(choice.lever.name))]
        if reverted or peak.peak_bytes is None:
            return replace(trial, reason=reverted[0] if reverted else "the memory of a step with it cannot be measured")
        found = replace(trial, baseline_peak_bytes=plain_bytes, candidate_peak_bytes=peak.peak_bytes)
        if peak.peak_bytes > limit_bytes:
            return found
        pace = Pace.for_step(step_seconds, seconds=0.0)
        window = running.window(choices, settle=pace.warm_steps, steps=pace.steps * pace.turns)
        return replace(found, reason="", baseline_seconds=step_seconds, candidate_seconds=median(window.seconds))

    try:
        return once_more_if_ended(process, measured)
    except TrialError as error:
        headline = error.headline if isinstance(error, TrialEnded) else ""
        return replace(trial, outcome="failed", reason=headline or str(error))


def _with_outcome(trial: Trial, kept: Trial) -> Trial:
    if trial is kept:
        return replace(trial, outcome="kept", reason="the fastest that fits")
    return replace(trial, reason=f"fits, but is slower than {kept.label}") if _fits(trial) else trial


def _too_large(plain_bytes: int, limit_bytes: int, tried: Sequence[Trial], offered: int, in_time: bool) -> ScriptError:
    wanted = f"a step's tensors take {format_bytes(plain_bytes)}, and {format_bytes(limit_bytes)} are allowed"
    known = [trial for trial in tried if trial.candidate_peak_bytes is not None]
    smaller = "use a smaller batch"
    if not offered:
        return ScriptError(wanted, limit="no lever that saves memory applies to this script", remedy=smaller)
    if not known:
        reasons = "; ".join(f"{trial.label}: {trial.reason}" for trial in tried) or "no time was left to try anything"
        return ScriptError(wanted, limit=reasons, remedy=smaller if in_time else MORE_TIME)
    least = min(known, key=lambda trial: trial.candidate_peak_bytes or 0)
    limit = f"the lowest peak reached is {format_bytes(least.candidate_peak_bytes or 0)}, with {least.label}"
    if not in_time:
        return ScriptError(wanted, limit=f"{limit}, of {len(tried)} of {offered} combinations", remedy=MORE_TIME)
    return ScriptError(wanted, limit=limit, remedy=smaller)


def peak_afresh(trials: Trials, choices: Sequence[Choice]) -> int | None:
    """Peak of a step under all of these in a new process; None where it fails, or cannot be measured."""
    from_start, live = split_by_switch(choices)
    with trials.trial(from_start, label="fit") as running:
        try:
            running.start()
            return running.peak(live).peak_bytes
        except (TrialError, ScriptError):
            return None
