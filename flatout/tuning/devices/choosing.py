"""Choose on how many devices a script trains, after its plan for one device has been found.

Each number is predicted first. Those that promise most are tried: a group of ranks and the run on one device with its
best plan, in alternating windows of steps, with the same samples in each batch. The fastest is compared once more, in
several groups of new processes, and then proved: it trains as one device. What is not proved is not chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flatout.decoding import decode
from flatout.errors import FlatoutError
from flatout.levers.lever import Choice, split_by_switch
from flatout.machine.description import Machine
from flatout.script.replicas.settings import Settings
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.search.search import stopped_by_interrupt
from flatout.timing import LoadWatch
from flatout.tuning.devices.found import DevicesTrial, DevicesTuned, Exchange, Predicted
from flatout.tuning.devices.prediction import predictions
from flatout.tuning.devices.ranks_trial import RANKS_START, Basis, OneAndSeveral, RanksRefused, for_ranks
from flatout.tuning.devices_proof import STEPS, DevicesProof
from flatout.tuning.last_comparison import compare_afresh, not_confirmed, one_pair_of_processes
from flatout.tuning.outcome import Found
from flatout.tuning.short_budget import LEAST_INCREASE
from flatout.tuning.verifier import busy
from flatout.tuning.windows import Pairing, compare_arms, compare_whole_runs
from flatout.units import counted, format_seconds

DEVICES_SHARE = 0.35
"""Of the budget, for all of this."""
TRIAL_SHARE, LEAST_TRIAL_SECONDS = 0.25, 4.0
"""Of the time that is left, for the windows of one trial; most are decided long before."""
STOPPED = "the search was stopped"
PROOF_SHARE, LEAST_STEPS = 0.4, 12
"""Of the time that is left, for the proof; and its fewest steps."""
PROOF_RUNS, PROOF_TIMES = 3, 1.5
"""Its runs on one device, and how many times as long as a plain step one of it takes."""


@dataclass(frozen=True, kw_only=True)
class DevicesAsked:
    """On up to how many devices, and as what the script's loss and batch norms count there."""

    most: int
    settings: Settings = field(default_factory=Settings)


def choose_devices(
    found: Found,
    setup: TrialSetup,
    machine: Machine,
    asked: DevicesAsked,
    deadline: Deadline,
    progress: Callable[[str], None],
) -> DevicesTuned:
    """found: of the tune on one device. Changes none of the user's files; raises nothing that a trial raises."""
    final, state = found.final, found.state
    planned = final.candidate_seconds if final is not None and state.kept else None
    own = deadline.reserving(0.0)
    basis = Basis(
        state=state,
        setup=replace(setup.in_new_processes(), deadline=own),
        machine=machine,
        settings=asked.settings,
        step_seconds=planned or state.observed.step_seconds or 0.01,
        deadline=own,
        progress=progress,
    )
    choosing, load = _Choosing(basis, asked.most), LoadWatch()
    with stopped_by_interrupt(choosing.stop, progress), deadline.stage("choosing the number of devices"):
        result = choosing.run()
    return replace(result, warnings=tuple(busy(load, "the comparison of devices")))


class _Choosing:
    """One such choice."""

    def __init__(self, basis: Basis, most: int) -> None:
        self._basis, self._most, self._deadline = basis, most, basis.deadline
        self._began = basis.deadline.elapsed_seconds
        self._in_ranks, self._left_out = for_ranks(basis.kept, on_cpu=basis.on_cpu)
        self._trials: dict[int, DevicesTrial] = {}
        self._exchange: Exchange | None = None

    def stop(self) -> bool:
        self._deadline.stopped = True
        return True  # the plan for one device has been found

    def run(self) -> DevicesTuned:
        if self._basis.state.stopped_after_seconds is not None:
            self._deadline.stopped = True
        candidates = self._possible()
        with contextlib.suppress(BudgetSpent):
            self._exchange, found = predictions(self._basis, candidates)
            for devices in [one.devices for one in found] or candidates:
                promised = next((one for one in found if one.devices == devices), None)
                self._trials[devices] = self._tried(devices, promised)
        for devices in candidates:
            if devices not in self._trials:
                self._trials[devices] = self._not_reached(devices, None)
        try:
            return self._best()
        except BudgetSpent:
            return self._one_device(STOPPED if self._deadline.stopped else "no time was left to prove it")

    # what is tried, in which order

    def _possible(self) -> list[int]:
        """Numbers of devices, without those of which batches are too small."""
        size = self._basis.batch_size
        found = []
        for devices in range(2, self._most + 1):
            if size is not None and size < devices:
                why = f"batches of {counted(size, 'sample')}, and each device takes at least one"
                self._trials[devices] = DevicesTrial(devices=devices, outcome="refused", reason=why)
            else:
                found.append(devices)
        return found

    # trials

    def _tried(self, devices: int, promised: Predicted | None) -> DevicesTrial:
        best = max((one.comparison.ratio for one in self._trials.values() if one.comparison), default=None)
        if best is not None and promised is not None and promised.most < max(1.0, best):
            why = f"predicted to be at most x{promised.most:.2f}, and x{best:.2f} was measured"
            return DevicesTrial(devices=devices, outcome="not tried", reason=why, predicted=promised)
        in_time = self._basis.has_time_for(self._needed_seconds)
        if not in_time and not self._basis.has_time_for(RANKS_START * self._basis.start_seconds):
            return self._not_reached(devices, promised)
        if (alike := self._refused_alike()) is not None:
            return replace(alike, devices=devices, predicted=promised, cost_seconds=0.0)
        self._basis.progress(f"trying {devices} devices")
        began = self._deadline.elapsed_seconds
        labels = tuple(choice.label for choice in self._in_ranks)
        trial = DevicesTrial(devices=devices, outcome="dropped", reason="", predicted=promised, levers=labels)
        try:
            if in_time:
                trial = _judged(trial, self._timed(devices))
            else:  # but for finding out whether the script can be shared
                with self._sides(devices).candidate():
                    trial = self._not_reached(devices, promised)
        except BudgetSpent:
            raise
        except FlatoutError as error:  # also of a machine that lacks something for it
            refused = isinstance(error, RanksRefused)
            trial = replace(trial, outcome="refused" if refused else "failed", reason=_reason_of(error))
        return replace(trial, cost_seconds=self._deadline.elapsed_seconds - began)

    @property
    def _needed_seconds(self) -> float:
        """Of the shortest trial, with its proof."""
        starts = (1 + RANKS_START) * self._basis.start_seconds
        return starts + LEAST_TRIAL_SECONDS + proof_seconds(self._basis, LEAST_STEPS)

    def _refused_alike(self) -> DevicesTrial | None:
        """A refusal that two numbers of devices have had holds for the others too."""
        refused = [one for one in self._trials.values() if one.outcome == "refused" and one.cost_seconds]
        reasons = [one.reason for one in refused]
        return next((one for one in refused if reasons.count(one.reason) > 1), None)

    def _timed(self, devices: int) -> Pairing:
        """One group of ranks against one process, until the verdict is clear."""
        sides, few = self._sides(devices), self._basis.state.few_steps
        seconds = max(LEAST_TRIAL_SECONDS, TRIAL_SHARE * self._deadline.seconds_left)
        if few is not None:
            pair_seconds = RANKS_START * few.pair_seconds(self._basis.step_seconds, self._basis.start_seconds)
            kept_back = pair_seconds + proof_seconds(self._basis, LEAST_STEPS)
            pace = replace(few.pace, seconds=seconds)
            has_time = partial(self._basis.has_time_for, kept_back)
            return compare_whole_runs(sides.baseline, sides.candidate, few, pace, None, has_time)
        pairs: list[tuple[float, float]] = []
        pairing, _ = one_pair_of_processes(sides, self._basis.pace(seconds), self._deadline, seconds, 1, pairs)
        return pairing

    def _sides(self, devices: int) -> OneAndSeveral:
        return OneAndSeveral(basis=self._basis, devices=devices, in_ranks=self._in_ranks)

    # what is chosen

    def _best(self) -> DevicesTuned:
        """The fastest that holds in new processes and is proved."""
        promising = [one for one in self._trials.values() if one.outcome == "kept"]
        promising.sort(key=lambda one: -(one.comparison.ratio if one.comparison else 0.0))
        reason = ""
        for trial in promising:
            self._leave_out_slow_levers(trial.devices)
            final = self._final(trial)
            if final is None or final.comparison.verdict != "faster":
                why = "could not be measured" if final is None else not_confirmed(final.comparison)
                self._drop(trial, f"faster in the trial, {why} in new processes")
                continue
            proof = proved(self._basis, trial.devices, self._in_ranks)
            if isinstance(proof, DevicesProof) and proof.verdict not in ("different", "not comparable"):
                self._drop_others(trial)
                return self._tuned(chosen=trial.devices, final=final, proof=proof)
            reason = proof if isinstance(proof, str) else f"not proved: {proof.verdict}: {proof.reason}"
            reason += f" (flatout run --devices {trial.devices} trains so all the same)"
            self._drop(trial, f"x{final.comparison.ratio:.2f} in new processes, {reason}")
        return self._one_device(reason)

    def _leave_out_slow_levers(self, devices: int) -> None:
        """What is faster on one device need not be in ranks: off, where they are slower with all of it."""
        from_start, live = split_by_switch(self._in_ranks)
        needed = RANKS_START * self._basis.start_seconds + LEAST_TRIAL_SECONDS
        in_time = self._basis.has_time_for(needed + self._needed_seconds)
        if not live or self._basis.state.few_steps is not None or not in_time:
            return
        self._basis.progress(f"comparing {devices} devices with and without the levers")
        seconds = max(LEAST_TRIAL_SECONDS, TRIAL_SHARE * (self._deadline.seconds_left - self._needed_seconds))
        try:
            with self._sides(devices).candidate() as arm:
                found = compare_arms(replace(arm, choices=()), arm, self._basis.pace(seconds))
        except BudgetSpent:
            raise
        except FlatoutError:  # too few steps; the last comparison shows what they are worth together
            return
        if found.comparison.verdict == "slower":
            ratio = f"x{found.comparison.ratio:.2f} in ranks"
            self._left_out |= {choice.field: ratio for choice in live}
            self._in_ranks = list(from_start)

    def _final(self, trial: DevicesTrial) -> Pairing | None:
        self._basis.progress(f"measuring {trial.devices} devices against one, in new processes")
        for_proof = proof_seconds(self._basis, proof_steps(self._basis))
        deadline = self._deadline.reserving(min(for_proof, self._deadline.seconds_left))
        pace = self._basis.pace(deadline.seconds_left)
        few = self._basis.state.few_steps
        try:
            return compare_afresh(self._sides(trial.devices), pace, deadline, deadline.seconds_left, few)
        except BudgetSpent:
            raise
        except FlatoutError:
            return None

    def _drop(self, trial: DevicesTrial, reason: str) -> None:
        self._trials[trial.devices] = replace(trial, outcome="dropped", reason=reason)

    def _drop_others(self, best: DevicesTrial) -> None:
        for one in list(self._trials.values()):
            if one.outcome == "kept" and one.devices != best.devices:
                self._drop(one, f"slower than {best.devices} devices")

    def _one_device(self, reason: str) -> DevicesTuned:
        for one in list(self._trials.values()):
            if one.outcome == "kept":
                self._drop(one, f"faster in the trial, but {reason}")
        tried = [one for one in self._trials.values() if one.comparison is not None]
        if not reason and tried:
            slower = all(one.comparison is not None and one.comparison.verdict == "slower" for one in tried)
            reason = "one device is faster here" if slower else "one device: others were not shown to be faster"
        outcomes = {one.outcome for one in self._trials.values()}
        reason = reason or f"one device: no other number could be tried ({', '.join(sorted(outcomes))})"
        return self._tuned(chosen=1, reason=reason)

    def _tuned(
        self, *, chosen: int, reason: str = "", final: Pairing | None = None, proof: DevicesProof | None = None
    ) -> DevicesTuned:
        return DevicesTuned(
            most=self._most,
            kind="cpu" if self._basis.on_cpu else "cuda",
            chosen=chosen,
            reason=reason,
            trials=tuple(self._trials[devices] for devices in sorted(self._trials)),
            exchange=self._exchange,
            comparison=None if final is None else final.comparison,
            baseline_seconds=None if final is None else final.baseline_seconds,
            candidate_seconds=None if final is None else final.candidate_seconds,
            left_out=self._left_out if chosen > 1 else None,
            enough_seconds=self._enough_seconds(),
            proof=proof,
            seconds=self._deadline.elapsed_seconds - self._began,
        )

    def _enough_seconds(self) -> float | None:
        late = sum(one.outcome == "not reached" for one in self._trials.values())
        if not late or self._deadline.stopped:
            return None
        spent = self._deadline.elapsed_seconds - self._began
        needed = (spent + late * self._needed_seconds) / DEVICES_SHARE
        return max(needed, LEAST_INCREASE * self._deadline.budget_seconds)

    def _not_reached(self, devices: int, promised: Predicted | None) -> DevicesTrial:
        seconds = self._deadline.seconds_left
        left = f"{format_seconds(seconds)} of the budget were" if seconds else "nothing of the budget was"
        needed = format_seconds(self._needed_seconds)
        why = STOPPED if self._deadline.stopped else f"{left} left, and a trial with its proof takes about {needed}"
        return DevicesTrial(devices=devices, outcome="not reached", reason=why, predicted=promised)


def _judged(trial: DevicesTrial, pairing: Pairing) -> DevicesTrial:
    found = pairing.comparison
    return replace(
        trial,
        outcome="kept" if found.verdict == "faster" else "dropped",
        reason=": ".join(filter(None, [found.verdict, found.reason])),
        comparison=found,
        baseline_seconds=pairing.baseline_seconds,
        candidate_seconds=pairing.candidate_seconds,
    )


def _reason_of(error: FlatoutError) -> str:
    if isinstance(error, TrialEnded) and error.status:
        return f"the script failed{' on ' * bool(error.note)}{error.note}: {error.headline or f'code {error.status}'}"
    return str(error)


# the proof


def proof_seconds(basis: Basis, steps: int) -> float:
    starts = (PROOF_RUNS + RANKS_START) * basis.start_seconds
    return starts + (PROOF_RUNS + 1) * PROOF_TIMES * steps * basis.step_seconds


def proof_steps(basis: Basis) -> int:
    """As many as time allows."""
    available = PROOF_SHARE * basis.deadline.seconds_left
    fixed, each = proof_seconds(basis, 0), proof_seconds(basis, 1) - proof_seconds(basis, 0)
    return max(LEAST_STEPS, min(STEPS, int((available - fixed) / each)))


def proved(basis: Basis, devices: int, in_ranks: Sequence[Choice]) -> DevicesProof | str:
    """The proof, under these levers on one device and in each rank; or why there is none. Raises BudgetSpent where it
    is not wanted any more."""
    steps = proof_steps(basis)
    basis.progress(f"proving that {devices} devices train as one, over {steps} steps")
    choices = tuple(tuple(choice.to_json()) for choice in in_ranks)
    settings = replace(basis.settings, levers=basis.setup.levers, choices=choices)
    try:
        return decode(DevicesProof, basis.result_of("proof", devices, settings, steps))
    except BudgetSpent:
        raise
    except FlatoutError as error:
        return f"not proved: {error}"
