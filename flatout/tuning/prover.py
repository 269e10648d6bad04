"""Prove a set of levers in new processes: record the plain script, record it with the levers, judge each claim.

prover = Prover(trials, Pattern(step_seconds=0.01, start_seconds=3), Deadline(120))
proof = prover.prove(choices)              # verdict, reason, horizon, one Claim per class of levers
prover.close()

The plain script's runs are kept from one call to the next, so that proving a subset of the levers costs one or two
runs. While one run is recorded the next one already starts, where they do not disturb each other.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flatout.errors import ScriptError, TrialError
from flatout.levers.lever import Choice, split_by_switch
from flatout.machine.detect import available_memory_bytes
from flatout.plan_choices import EXACTNESS_ORDER, Exactness, allowed, worst
from flatout.script.numerics import NumericsRequest
from flatout.script.reference import EARLY_CHECKS
from flatout.script.trial.answers import TrialEnded
from flatout.search.deadline import Deadline
from flatout.search.search import Progress
from flatout.tuning import proof as judge
from flatout.tuning.numerics import Numerics, not_alike
from flatout.tuning.results import Claim, Proof, ProofVerdict
from flatout.tuning.trials import RunningTrial, Trials
from flatout.tuning.windows import Arm, FewSteps

WANTED_STEPS = {"bit-identical": 300, "rounding": 300, "reduced": 500}
WANTED_EPOCHS, MOST_STEPS = 2.2, 20_000
"""Only a run of more than two epochs shows what a script does once per epoch; more, because a step has passed
before."""
LEAST_STEPS = 5
"""Of a proof whose steps are so long that there is no time for more; every second one is a check step then."""
CHECKS, STEPS_A_CHECK = 24, 4
SHARE_FOR_RUNS = 0.7
"""Of the time; the rest is for finding a lever at fault."""
LEAST_SHARE = 0.05
"""Least share of the whole budget for the steps themselves: starting the runs may take all of the proof's time, and a
few hundred quick steps cost little in comparison."""
RECORDING_FACTOR = 1.5
MEMORY_MARGIN = 1.5
"""Times the memory of the largest run so far: what has to be free for keeping more than one process of a side."""
SHARED_START = 0.6
"""Of a start: the cost of each of two that start at once."""
STATISTICAL_RUNS = 3
MOST_FARTHER = 4
"""Plain runs from weights moved farther. Each shows a unit that a lever's rounding switches with a chance of about a
half."""

REDUCED: tuple[Exactness, ...] = ("reduced",)
ROUNDING: tuple[Exactness, ...] = ("rounding",)

Repeats = Literal["to the bit", "to rounding", "no"]
"""How well plain runs agree, every generator seeded."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What is known of the script's run, which determines the length of a proof."""

    step_seconds: float
    start_seconds: float = 0.0
    """Of a plain run."""
    levers_start_seconds: float = 0.0
    """Extra time to start a run with the levers."""
    total_steps: int | None = None
    """Steps after which the script ends; None: not known."""
    epoch_steps: int | None = None
    """Of one pass over the training loader; None: there is no loader, or its length is unknown."""
    few: FewSteps | None = None
    """The script's length, where it is so short that all of its steps are recorded."""

    def starting_seconds(self, trials: Trials, runs: RunsMade) -> float:
        """Until each run is at its first step, and its levers are on."""
        plain_seconds = runs.all * self.start_seconds * (SHARED_START if trials.starts_overlap else 1.0)
        return plain_seconds + runs.with_levers * self.levers_start_seconds


def least_seconds(pattern: Pattern, trials: Trials, claims: Collection[Exactness] = REDUCED) -> float:
    """Typical duration of the shortest proof of these claims."""
    steps, runs = LEAST_STEPS, RunsMade.for_claims(claims)
    if pattern.few is not None:
        steps = pattern.few.compared
        if steps < judge.LEAST_LOSSES:  # no 'reduced' lever is tried
            runs = RunsMade.for_claims(ROUNDING)
    recording = RECORDING_FACTOR * steps * pattern.step_seconds
    return pattern.starting_seconds(trials, runs) + runs.all * recording


class RunsMade(NamedTuple):
    """Usual runs in the proof of a set of claims, where plain runs agree."""

    all: int
    with_levers: int

    @classmethod
    def for_claims(cls, claims: Collection[Exactness]) -> RunsMade:
        """A plain one and one per class, with its levers and all stricter ones; where rounding is allowed, one from
        nudged weights; for 'reduced', a free one with the levers."""
        reduced = "reduced" in claims
        with_levers = len({*claims}) + reduced
        return cls(all=1 + (reduced or "rounding" in claims) + with_levers, with_levers=with_levers)


class Prover:
    """Records and judges. The reference of the plain run is kept in a folder of its own."""

    def __init__(
        self,
        trials: Trials,
        pattern: Pattern,
        deadline: Deadline,
        progress: Progress = lambda text: None,
        latest: Deadline | None = None,
    ) -> None:
        """latest: of runs without which a lever would be rejected; None: `deadline`."""
        self._folder = Path(tempfile.mkdtemp(prefix="reference-", dir=trials.shared_folder))
        self._trials = trials
        self._pattern, self._deadline, self._progress = pattern, deadline, progress
        self._latest = latest or deadline
        self._steps: int | None = None
        self._recorded_seconds = 0.0
        """Of the longest recording of a plain run so far, without its start."""
        self._plains: list[Numerics] = []
        """Plain runs from one seed: the one that wrote the reference, and more where a claim needs them."""
        self._nudged: Numerics | None = None
        self._farther: list[Numerics] = []
        self._coarse: Numerics | None = None
        """From weights moved by a 16-bit rounding error."""
        self._rough: Numerics | None = None
        """The same, at every check step."""
        self._repeats: Repeats | None = None
        self._judged: dict[tuple[Exactness, tuple[Choice, ...]], Proof] = {}
        """Verdicts so far: proving a set again without one of its levers repeats only some claims."""
        self._prestarted: tuple[list[Choice], RunningTrial] | None = None
        """(levers on from its start, a process that starts while another is recorded)"""
        self.keeps_pairs = 0
        """How many of the latest processes of each side stay where their recording ended, for `arms`."""
        self._kept: dict[bool, list[tuple[list[Choice], RunningTrial]]] = {False: [], True: []}
        """Is it with levers? -> (levers, process), the latest last"""
        self._peak_bytes = 0
        """The most memory that a run has taken."""

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_time_for(self, runs: int, deadline: Deadline | None = None) -> bool:
        """Is there time for this many more runs of the usual length? deadline: None: that of the proof."""
        pattern = self._pattern
        expected = RECORDING_FACTOR * (self._steps or LEAST_STEPS) * pattern.step_seconds
        run_seconds = pattern.start_seconds + max(expected, self._recorded_seconds)
        return runs * run_seconds <= (deadline or self._deadline).seconds_left

    def arms(self, choices: Sequence[Choice]) -> list[tuple[Arm, Arm]]:
        """Pairs of (plain, planned): new processes too, which have started and compiled; as many as were kept of both
        sides and have not ended. They end with the prover."""
        plains = [process for _, process in self._kept[False] if process.alive]
        planned = [process for levers, process in self._kept[True] if levers == [*choices] and process.alive]
        _, live = split_by_switch(choices)
        both = zip(reversed(plains), reversed(planned), strict=False)
        return [(Arm(one, suspended=True), Arm(other, live, suspended=True)) for one, other in both]

    def close(self) -> None:
        self._drop_prestarted()
        self._drop_kept()
        shutil.rmtree(self._folder, ignore_errors=True)

    def prove(self, choices: Sequence[Choice]) -> Proof:
        """The verdict on these levers together."""
        plain = self._plain(choices)
        judged: list[Proof] = []
        for claimed in EXACTNESS_ORDER:
            if not any(choice.exactness == claimed for choice in choices):
                continue
            so_far = [choice for choice in choices if allowed(choice.exactness, claimed)]
            try:
                found = self._known_or_new(claimed, so_far)
            except (TrialError, ScriptError) as error:
                found = _of_claim(_unjudged(plain), claimed, so_far, "rejected", _failure(error))
            if found.verdict == "statistical":  # steps cannot be compared: all levers are judged together
                return self._whole([self._by_levels(choices, plain)], plain)
            judged.append(found)
            if not found.holds:
                break
        return self._whole(judged, plain)

    def _whole(self, judged: Sequence[Proof], plain: Numerics) -> Proof:
        """The last of them, with the claims of all."""
        self._drop_prestarted()  # not needed: it would hold memory while the next thing is measured
        return replace(
            judged[-1],
            epochs=plain.steps / self._pattern.epoch_steps if self._pattern.epoch_steps else None,
            claims=tuple(claim for one in judged for claim in one.claims),
            repeatable=None if self._repeats is None else self._repeats == "to the bit",
            notes=tuple(_notes(plain, self._repeats)),
        )

    # the claims

    def _known_or_new(self, claimed: Exactness, choices: Sequence[Choice]) -> Proof:
        key = claimed, tuple(choices)
        if key not in self._judged:
            own = _labels([choice for choice in choices if choice.exactness == claimed])
            self._progress(f"proof: {', '.join(own)} {'is' if len(own) == 1 else 'are'} {claimed}?")
            self._judged[key] = self._claim(claimed, choices)
        return self._judged[key]

    def _claim(self, claimed: Exactness, choices: Sequence[Choice]) -> Proof:
        """Of this claim alone."""
        plain = self._plain(choices)
        found = _unjudged(plain)
        if claimed == "bit-identical" and (judged := self._bit_identical(plain, choices)) is not None:
            return judged
        if self._repeats == "no":
            return replace(found, verdict="statistical")
        nudged = self._nudged = self._nudged or self._record([], role="checked", nudge="rounding", then=choices)
        # If a run from nudged weights is that close to the plain one, so is a plain one: that saves a run.
        near = self._repeats is not None or judge.repeats_to_rounding(plain, nudged)
        if not near and self._repeats_how() == "no":
            return replace(found, verdict="statistical")
        checked = self._record(choices, role="checked", then=choices if claimed == "reduced" else None)
        nudged = self._with_farther(plain, nudged, checked)
        found = replace(
            found,
            loss_difference=judge.largest_loss_difference(plain, checked),
            loss_floor=judge.largest_loss_difference(plain, nudged),
            gradient_difference=judge.largest_gradient_difference(checked),
            gradient_floor=judge.largest_gradient_difference(nudged),
            candidate_losses=checked.mean_losses(),
        )
        beyond = judge.not_within_rounding(plain, nudged, checked)
        if beyond is None:
            factor, floor = judge.ROUNDING_FACTOR, judge.LOSS_ROUNDING_FLOOR
            reason = f"gradients, updates, losses within {factor:.0f}x the effect of one rounding error, or {floor:.0e}"
            return _of_claim(found, claimed, choices, "within rounding", reason)
        if claimed == "reduced":
            return self._reduced(plain, nudged, checked, choices, found)
        may_be_reduced = claimed == "rounding" and judge.not_reduced(plain, nudged, checked) is None
        return _of_claim(found, claimed, choices, "rejected", beyond, may_be_reduced=may_be_reduced)

    def _with_farther(self, plain: Numerics, nudged: Numerics, checked: Numerics) -> Numerics:
        """The nudged run; where it seldom explains the checked one, with plain runs that were moved farther, which show
        the units that switch sides there."""
        for number in range(MOST_FARTHER):
            if not judge.is_seldom_beyond_rounding(plain, nudged, checked):
                break
            if number == len(self._farther):
                if not self.has_time_for(1, self._latest):
                    break
                self._progress("proof: do plain runs differ as much, where units switch sides?")
                seed, ulps = number + 1, judge.FARTHER
                farther = self._record([], role="checked", nudge="rounding", nudge_seed=seed, nudge_ulps=ulps)
                self._farther.append(farther)
            nudged = judge.with_farther(plain, nudged, self._farther[number])
        return nudged

    def _bit_identical(self, plain: Numerics, choices: Sequence[Choice]) -> Proof | None:
        """None where plain runs do not match bit for bit either."""
        candidate, found = self._record(choices), _unjudged(plain)
        difference = judge.not_bit_identical(plain, candidate)
        if difference is None:
            self._repeats = "to the bit"  # two plain runs would hardly differ then
            reason = "losses, gradient norms, weights and RNG states match bit for bit"
            found = replace(found, candidate_losses=candidate.mean_losses())
            return _of_claim(found, "bit-identical", choices, "bit-identical", reason)
        if self._repeats_how() == "to the bit":
            reason = f"it should be bit-identical, but {difference}"
            return _of_claim(found, "bit-identical", choices, "rejected", reason)
        return None

    def _reduced(
        self, plain: Numerics, nudged: Numerics, checked: Numerics, choices: Sequence[Choice], found: Proof
    ) -> Proof:
        rough = None
        if judge.not_reduced(plain, nudged, checked) is not None and judge.differs_only_later(plain, nudged, checked):
            # Gradients leave the plain ones only later. The verdict on other levers does not depend on this run.
            rough = self._with_rough_weights(choices)
        if reason := judge.not_reduced(plain, nudged, checked, rough) or self._diverges(plain, checked, choices):
            return _of_claim(found, "reduced", choices, "rejected", reason)
        free = self._record(choices)
        reason = judge.drifts(plain, free, self._coarse)
        if reason is not None and self._coarse is None and judge.may_drift_by_noise(plain, free):
            self._progress("proof: do the losses of a plain run with 16-bit noise in its first weights drift as much?")
            self._coarse = self._record([], nudge="16-bit")
            reason = judge.drifts(plain, free, self._coarse)
        if reason is not None:
            return _of_claim(found, "reduced", choices, "rejected", reason)
        drift = _largest_mean(judge.late_differences(plain, free))
        found = replace(found, loss_drift=drift, candidate_losses=free.mean_losses())
        where = ""
        if rough is not None:
            where = judge.where_stable(rough)
            found = replace(
                found,
                loss_floor=judge.largest_loss_difference(plain, rough),
                gradient_floor=judge.largest_gradient_difference(rough),
            )
        level = f"losses of the later half {drift:+.2%} off"
        if self._coarse is not None:
            own = _largest_mean(judge.late_differences(plain, self._coarse))
            level += f" (16-bit noise in the first weights: {own:+.2%})"
        reason = f"each gradient the plain one with 16-bit noise{where}, the optimizer's steps plain; {level}"
        return _of_claim(found, "reduced", choices, "reduced", reason)

    def _with_rough_weights(self, choices: Sequence[Choice]) -> Numerics | None:
        """A plain run whose weights are moved by a 16-bit rounding error at every check step, which shows where
        gradients that leave the plain ones say nothing; None: no time for it."""
        if self._rough is None and self.has_time_for(1, self._latest):
            self._progress("proof: does 16-bit noise in the weights change the numbers of a plain run as much?")
            self._rough = self._record([], role="checked", nudge="16-bit", then=choices)
        return self._rough

    def _diverges(self, plain: Numerics, checked: Numerics, choices: Sequence[Choice]) -> str | None:
        """Why it diverges beyond what noise explains. The runs that measure the noise are made only if needed, and if
        there is time: with as much noise in the gradients, and with gradients taken at weights that are rounded to
        bf16, as training may be sensitive to that. Last comes a run from moved weights, which shows in a loss at once:
        at steps that amplify noise as no gradient does."""
        reason, noisy = judge.diverges(plain, checked), list[Numerics]()
        as_noisy: dict[str, object] = {"gradient_noise": judge.typical_gradient_difference(checked)}
        for noise in (as_noisy, {"weight_noise": True}):
            if reason is not None and self.has_time_for(1, self._latest):
                self._progress("proof: does noise make a plain run diverge as much?")
                noisy.append(self._record([], role="checked", then=choices, **noise))
                reason = judge.diverges(plain, checked, *noisy)
        if reason is not None and judge.diverges(plain, checked, *noisy, rough=checked) is None:
            reason = judge.diverges(plain, checked, *noisy, rough=self._with_rough_weights(choices))
        return reason

    def _by_levels(self, choices: Sequence[Choice], plain: Numerics) -> Proof:
        """For a script whose plain runs differ: several runs of each side, compared by their levels."""
        while len(self._plains) < STATISTICAL_RUNS:
            self._plains.append(self._record([]))
        found, resolution = _unjudged(plain), None
        try:
            candidates = [self._record(choices) for _ in range(STATISTICAL_RUNS)]
            reason, resolution = not_alike(self._plains, candidates)
            found = replace(found, resolution=resolution, candidate_losses=candidates[0].mean_losses())
        except (TrialError, ScriptError) as error:
            reason = _failure(error)
        verdict: ProofVerdict = "rejected" if reason else "statistical"
        reason = reason or (
            f"{STATISTICAL_RUNS} runs of each: gradients of the same size, losses at the same level; "
            f"a difference in loss below {resolution:.1%} would not have been detected"
        )
        claimed = worst(choice.exactness for choice in choices)
        claim = Claim(levers=_labels(choices), claimed=claimed, verdict=verdict, reason=reason)
        return replace(found, verdict=verdict, reason=reason, claims=(claim,))

    # the runs

    def _plain(self, choices: Sequence[Choice]) -> Numerics:
        """The plain run that writes the reference; shorter than planned where the script is."""
        if not self._plains:
            self._steps = self._wanted_steps(choices)
            self._progress(f"proof: the plain {self._trials.kind}, {self._steps} steps")
            first = self._record(
                [], role="reference", then=[one for one in choices if one.exactness == "bit-identical"]
            )
            if first.ended and first.steps > 1:  # all runs stop before the script's end, which might change something
                for old in self._folder.rglob("*.pt"):
                    old.unlink()
                self._steps = first.steps - 1
                first = self._record([], role="reference")
            self._plains.append(first)
        return self._plains[0]

    def _repeats_how(self) -> Repeats:
        if self._repeats is None:
            plain, again = self._plains[0], self._record([], then=[])
            self._plains.append(again)
            if judge.not_bit_identical(plain, again) is None:
                self._repeats = "to the bit"
            elif judge.repeats_to_rounding(plain, self._record([], role="checked", then=[])):
                self._repeats = "to rounding"
            else:
                self._repeats = "no"
        return self._repeats

    def _record(
        self,
        choices: Sequence[Choice],
        *,
        then: Sequence[Choice] | None = None,
        **asked: Any,  # fields of NumericsRequest
    ) -> Numerics:
        """`then`: the levers of the run that will probably be recorded next; None: unknown."""
        assert self._steps is not None
        checks = self._check_steps(self._steps)
        request = NumericsRequest(steps=self._steps, folder=str(self._folder), checks=checks, **asked)
        from_start, live = split_by_switch(choices)
        while True:
            process, alone = self._next_process(from_start, then)
            by_themselves = self._trials.from_the_start()
            alone = alone and not any(self._kept.values()) and by_themselves is self._trials
            with self._deadline.stage("the proof"), contextlib.ExitStack() as stack:
                stack.enter_context(process)
                try:
                    process.start()
                    began = self._deadline.elapsed_seconds
                    answer = process.numerics(live, request)
                    found = Numerics.from_answer(answer)
                    self._peak_bytes = max(self._peak_bytes, answer["peak_resident_bytes"] or 0)
                    if not choices:
                        self._recorded_seconds = max(self._recorded_seconds, self._deadline.elapsed_seconds - began)
                except TrialError:
                    if alone:
                        raise
                else:
                    if self.keeps_pairs and not found.ended:
                        self._keep(process, choices)
                        stack.pop_all()
                    return found
            self._drop_prestarted()
            self._drop_kept()
            # Two processes at once may need more memory than there is.
            self.keeps_pairs, self._trials, then = 0, by_themselves, None

    def _keep(self, process: RunningTrial, choices: Sequence[Choice]) -> None:
        """Instead of an older one of its side, where enough are kept, or memory is short for another run."""
        of_side = self._kept[bool(choices)]
        of_side.append(([*choices], process))
        while len(of_side) > self.keeps_pairs or (len(of_side) > 1 and not self._has_memory_for_a_run()):
            of_side.pop(0)[1].close()

    def _has_memory_for_a_run(self) -> bool:
        return available_memory_bytes() > MEMORY_MARGIN * self._peak_bytes

    def _drop_kept(self) -> None:
        for of_side in self._kept.values():
            while of_side:
                of_side.pop()[1].close()

    def _check_steps(self, steps: int) -> tuple[int, ...]:
        """For few steps, every second one, so that a step from the run's own state lies in between, and the last, whose
        update shows nowhere else; for more, such early ones, and others evenly spread."""
        if self._pattern.few is not None or steps < 2 * STEPS_A_CHECK:
            return tuple(sorted({*range(0, steps, 2), steps - 1}))
        early = range(0, 2 * EARLY_CHECKS, 2)
        count = max(1, min(CHECKS, steps // STEPS_A_CHECK))
        return tuple(sorted({*early, *(i * steps // count for i in range(count))}))

    def _next_process(self, from_start: list[Choice], then: Sequence[Choice] | None) -> tuple[RunningTrial, bool]:
        """(the process for a run, whether no other runs at the same time)"""
        process, was_prestarted = None, False
        if self._prestarted is not None and self._prestarted[0] == from_start:
            process, was_prestarted, self._prestarted = self._prestarted[1], True, None
        self._drop_prestarted()
        if process is None:
            process = self._trials.trial(from_start, label="proof")
            process.spawn()
        if then is not None and self._trials.starts_overlap:
            next_from_start, _ = split_by_switch(then)
            self._prestarted = next_from_start, self._trials.trial(next_from_start, label="proof")
            self._prestarted[1].spawn()
        process.expected_step_seconds = self._pattern.step_seconds
        return process, not was_prestarted and self._prestarted is None

    def _drop_prestarted(self) -> None:
        if self._prestarted is not None:
            self._prestarted[1].close()
            self._prestarted = None

    def _wanted_steps(self, choices: Sequence[Choice]) -> int:
        """As many as the claims need and the time allows; two epochs where possible."""
        pattern = self._pattern
        if pattern.few is not None:
            return pattern.few.compared
        claims = {choice.exactness for choice in choices}
        wanted = max(WANTED_STEPS[claim] for claim in claims) if claims else WANTED_STEPS["rounding"]
        if pattern.epoch_steps:
            wanted = min(MOST_STEPS, max(wanted, math.ceil(WANTED_EPOCHS * pattern.epoch_steps)))
        runs = RunsMade.for_claims(claims)
        if "reduced" in claims:
            runs = runs._replace(all=runs.all + 1)  # one more where losses drift
        starting = pattern.starting_seconds(self._trials, runs)
        available = max(0.0, SHARE_FOR_RUNS * self._deadline.seconds_left - starting)
        least = LEAST_SHARE * self._deadline.budget_seconds
        affordable = int(max(available, least) / (runs.all * RECORDING_FACTOR * max(pattern.step_seconds, 1e-5)))
        return max(LEAST_STEPS, min(wanted, affordable, (pattern.total_steps or MOST_STEPS) - 2))


def _unjudged(plain: Numerics) -> Proof:
    return Proof(verdict="rejected", reason="", steps=plain.steps, baseline_losses=plain.mean_losses())


def _of_claim(
    found: Proof,
    claimed: Exactness,
    choices: Sequence[Choice],
    verdict: ProofVerdict,
    reason: str,
    *,
    may_be_reduced: bool = False,
) -> Proof:
    """What was found, with the verdict on this claim of those of the choices that make it."""
    own = _labels([choice for choice in choices if choice.exactness == claimed])
    claim = Claim(levers=own, claimed=claimed, verdict=verdict, reason=reason, may_be_reduced=may_be_reduced)
    return replace(found, verdict=verdict, reason=reason, claims=(claim,))


def _labels(choices: Sequence[Choice]) -> tuple[str, ...]:
    return tuple(choice.label for choice in choices)


def _failure(error: TrialError | ScriptError) -> str:
    headline = error.headline if isinstance(error, TrialEnded) else ""
    return f"a new run with it failed: {headline or error}"


def _largest_mean(streams: Sequence[Sequence[float]]) -> float:
    return max((sum(stream) / len(stream) for stream in streams), key=abs, default=0.0)


def _notes(plain: Numerics, repeats: Repeats | None) -> list[str]:
    notes = []
    if plain.unseeded:
        shown = ", ".join(plain.unseeded[:3]) + (" ..." if len(plain.unseeded) > 3 else "")
        notes.append(f"the script leaves generators unseeded ({shown}); the proof gave both sides the same seeds")
    if repeats == "to rounding":
        notes.append(
            "plain runs differ by rounding errors although every generator was seeded, as where a GPU sums in no fixed "
            "order: nothing finer can be proved"
        )
    if repeats == "no":
        notes.append(
            "plain runs differ although every generator was seeded: the script depends on the order of threads or "
            "processes, on the clock, or on an operation without a fixed order"
        )
    if plain.sampled:
        notes.append("the model is too large to compare in full: 16,384 elements of each tensor were compared")
    return notes
