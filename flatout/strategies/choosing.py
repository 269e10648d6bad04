"""Choose how several ranks share the training of one model.

One process makes a forecast of each rank's memory, and times a step. What ranks exchange is measured, and a step of
each strategy predicted. All that fit are then tried, the most promising first: a group of ranks and one process, in
alternating windows of steps of the same batches. The fastest is compared once more, in several groups of new processes,
and proved: it trains as one process. What is not proved is not chosen.

Where the model does not fit into one process, the first strategy that trains takes its place, and nothing is proved.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.decoding import decode
from flatout.errors import FlatoutError, PlanError, ScriptError, TrialError
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.plan_choices import worst
from flatout.script.replicas.settings import Settings
from flatout.script.replicas.starting import write_settings
from flatout.script.trial.answers import Answer, TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.script.work_folder import work_folder
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.search.search import stopped_by_interrupt
from flatout.strategies.facts import (
    ALONE,
    STRATEGIES,
    Memory,
    TrainingFacts,
    planned_for,
    strategies_of,
    strategy_of,
)
from flatout.strategies.found import Outcome, StrategiesFound, StrategyProof, StrategyTrial
from flatout.strategies.prediction import Points, Predicted, group_of, predictions
from flatout.strategies.proving import NUDGES, proved
from flatout.strategies.sides import TwoWays, Way, trainer
from flatout.strategies.told import FACTS, Told
from flatout.timing import LoadWatch
from flatout.tuning.devices.ranks_trial import RanksRefused
from flatout.tuning.last_comparison import compare_afresh, not_confirmed
from flatout.tuning.ranks.job import JobRequest, RanksJob
from flatout.tuning.trials import RunningTrial
from flatout.tuning.verifier import busy
from flatout.tuning.windows import Arm, FewSteps, Pace, Pairing, compare_arms, compare_whole_runs
from flatout.units import counted, format_bytes, format_seconds

TRIAL_SHARE, LEAST_TRIAL_SECONDS = 0.1, 4.0
"""Of the time that is left, for the windows of one trial; most are decided long before."""
USUAL_START_SECONDS, GROUP_START = 5.0, 1.5
"""Of one process, until one was started; and how many times as long a group takes, whose processes share the cores."""
LEAST_STEPS, MOST_STEPS = 8, 30
"""Of the proof."""
STEP_OF_PROOF = 1.5
"""Times a plain step."""
LEAST_PATIENCE_SECONDS, PATIENT_STARTS = 60.0, 5.0
"""For a first step, and for all of what a process does besides: at least, and times what it usually takes."""
USUAL_STEP_SECONDS = 0.1
"""Where one process does not fit, so that none was timed."""
FEWER_THREADS_SHARE = 0.95
"""Of the time of a step, below which fewer threads count as faster."""
LEAST_STEPS_A_TURN = 5
"""Of runs that take turns, because memory does not suffice for both at once."""


@dataclass(frozen=True, kw_only=True)
class StrategiesRequest:
    """What to choose for."""

    spec: str
    """'train.py:make'."""
    ranks: int
    plan: Plan
    """Of one process; the strategy is added to it."""
    budget_seconds: float = 600.0
    allow_network: bool = False
    visible: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each rank; empty: they train on the CPU."""


def choose_strategy(
    request: StrategiesRequest,
    machine: Machine,
    progress: Callable[[str], None] = lambda text: None,
    deadline: Deadline | None = None,
) -> StrategiesFound:
    """Changes none of the user's files. Raises UsageError where the user's function cannot be used, ScriptError where
    it fails in one process."""
    deadline = deadline or Deadline(request.budget_seconds)
    load = LoadWatch()
    with work_folder() as folder:
        setup = TrialSetup(
            target=trainer(folder), work_folder=folder, allow_network=request.allow_network, deadline=deadline
        )
        choosing = _Choosing(request, machine, setup, deadline, progress)
        with stopped_by_interrupt(choosing.stop, progress):
            found = choosing.run()
    warnings = (*busy(load, "the trials"), *filter(None, [deadline.explanation]))
    plan = replace(found.plan, warnings=(*found.plan.warnings, *warnings))
    return replace(found, plan=plan, seconds=deadline.elapsed_seconds, warnings=(*found.warnings, *warnings))


class _Choosing:
    """One such choice."""

    def __init__(
        self,
        request: StrategiesRequest,
        machine: Machine,
        setup: TrialSetup,
        deadline: Deadline,
        progress: Callable[[str], None],
    ) -> None:
        self._request, self._machine, self._setup = request, machine, setup
        self._deadline, self._progress = deadline, progress
        self._trials: dict[str, StrategyTrial] = {}
        self._plans: dict[str, Plan] = {}
        self._start_seconds = USUAL_START_SECONDS
        self._facts_seconds = 0.0
        """What one process took to find out what is known before; starting it is part of that."""
        self._open = contextlib.ExitStack()
        self._running: RunningTrial | None = None
        """The baseline's process."""

    def stop(self) -> bool:
        """End soon, with what was tried; False where that is nothing."""
        self._deadline.stopped = True
        return bool(self._trials)

    def run(self) -> StrategiesFound:
        request = self._request
        self._progress("one process: forecasts of memory, and the time of a step")
        self._facts = self._found_facts()
        self._facts_seconds = self._deadline.elapsed_seconds
        self._limit_bytes = self._most_bytes(request.ranks)
        self._progress("measuring what ranks exchange")
        self._predicted, exchange_seconds = self._predictions()
        candidates = self._possible()
        baseline = self._baseline(candidates)
        found = StrategiesFound(
            spec=request.spec,
            ranks=request.ranks,
            facts=self._facts,
            limit_bytes=self._limit_bytes,
            baseline="" if baseline is None else strategy_of(baseline.plan),
            trials=(),
            chosen=None,
            reason="no strategy can be used",
            plan=request.plan,
            exchange_seconds=exchange_seconds,
            budget_seconds=request.budget_seconds,
            seconds=0.0,
        )
        if baseline is not None:
            with contextlib.suppress(BudgetSpent), self._open:
                for name in candidates:
                    if name != strategy_of(baseline.plan):
                        self._try(name, baseline)
            try:
                with self._deadline.stage("the last comparison and the proof"):
                    found = self._best(found, baseline)
            except BudgetSpent:
                found = replace(found, reason="stopped before a strategy was proved")
            for name in candidates:
                if name not in self._trials:
                    self._note(name, "not reached", "the search was stopped")
        return replace(
            found,
            trials=tuple(self._trials[name] for name in STRATEGIES if name in self._trials),
            enough_seconds=self._enough_seconds(),
            warnings=self._about_threads(),
        )

    def _about_threads(self) -> tuple[str, ...]:
        threads = self._alone_plan.threads
        if threads is None or self._request.plan.threads is not None:
            return ()
        own, fewer = (format_seconds(one or 0.0) for one in (self._facts.step_seconds, self._facts.rank_step_seconds))
        several = f"with {counted(threads, 'thread')} instead of {self._facts.threads}"
        return (
            f"one process takes {fewer} a step {several}, and {own} as it is: strategies were compared with the former "
            "(flatout.tune(step, batches) tries and proves it)",
        )

    # what is known before

    def _found_facts(self) -> TrainingFacts:
        request = self._request
        folder = self._folder("facts")
        told = Told(
            spec=request.spec,
            plan=request.plan.to_toml(),
            role="facts",
            ranks=request.ranks,
            memory_limit_bytes=self._most_bytes(1),
        )
        with self._deadline.stage("what one process finds out"):
            self._run(told, folder, max(LEAST_PATIENCE_SECONDS, self._deadline.seconds_left))
        return decode(TrainingFacts, json.loads((folder / FACTS).read_text(encoding="utf-8")))

    def _folder(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._setup.work_folder))

    def _run(self, told: Told, folder: Path, most_seconds: float = math.inf) -> None:
        """Processes that do what they are told, to their end. Raises what they refuse with; ScriptError where they
        fail, or take longer than that."""
        told.write(folder)
        ranks = 1 if told.role == "facts" else told.ranks
        request = JobRequest(
            kind="module",
            target=trainer(folder),
            devices=ranks,
            allow_network=self._request.allow_network,
            shared=tuple(str(path) for path in (folder, *self._setup.written)),
        )
        with RanksJob(folder, request) as job:
            status = self._result_of(job, most_seconds)
            number = "one process" if ranks == 1 else f"{ranks} ranks"
            if status is None:
                what = f"{told.spec}: what {number} had to do took more than {format_seconds(most_seconds)}"
                budget = f"the budget is {format_seconds(self._deadline.budget_seconds)}"
                remedy = "allow more time: --budget (in Python: seconds=), if it does not hang"
                raise ScriptError(what, limit=budget, remedy=remedy)
            if status:
                what = f"{told.spec} failed in {number} (exit status {status})"
                raise ScriptError(what, remedy=job.last_words)
            if told.answer is not None and not (folder / told.answer).exists():
                raise ScriptError(f"{told.spec} ended {number} without an error", limit="before it could be timed")

    def _result_of(self, job: RanksJob, most_seconds: float) -> object:
        """None where it takes longer than that. Raises BudgetSpent where it is not wanted any more."""
        until = self._deadline.elapsed_seconds + most_seconds
        found = job.result(lambda: not self._deadline.stopped and self._deadline.elapsed_seconds < until)
        if self._deadline.stopped:
            raise BudgetSpent(self._deadline)
        return found

    def _most_bytes(self, ranks: int) -> int | None:
        """What one of so many ranks may take: of its own GPU, or its share of the host's memory; None: unknown."""
        if self._request.visible:
            gpus = self._machine.usable_gpus[:ranks]
            sizes = [gpu.memory_free_bytes or gpu.memory_total_bytes for gpu in gpus]
            return min((size for size in sizes if size is not None), default=None)
        return self._machine.memory_available_bytes // ranks

    def _predictions(self) -> tuple[dict[str, Predicted], float | None]:
        """(by strategy, seconds of an all_reduce of all gradients)"""
        ranks, facts = self._request.ranks, self._facts
        group = group_of(self._collectives(), ranks)
        parts = None
        with contextlib.suppress(PlanError):
            parts = planned_for(self._request.plan, "pipeline", ranks, facts.samples).micro_batches
        exchange = None if group is None else group.all_reduce_seconds(facts.parameter_bytes)
        return predictions(facts, group, ranks, parts), exchange

    def _collectives(self) -> Points:
        """Measured between the ranks; empty where that fails."""
        folder = self._folder("collectives")
        write_settings(Settings(visible=self._request.visible), folder)
        request = JobRequest(
            kind="collectives",
            target=trainer(folder),
            devices=self._request.ranks,
            allow_network=self._request.allow_network,
        )
        try:
            with self._deadline.stage("measuring collectives"), RanksJob(folder, request) as job:
                found: Answer = self._result_of(job, LEAST_PATIENCE_SECONDS)
            return {name: [(size, seconds) for size, seconds in points] for name, points in (found or {}).items()}
        except BudgetSpent:
            raise
        except FlatoutError:
            return {}

    # what is tried

    def _possible(self) -> list[str]:
        """Strategies that the plan and the memory allow, the most promising first."""
        limit, found = self._limit_bytes, []
        for name in strategies_of(self._request.ranks):
            memory = self._facts.memory.get(name, Memory(bytes=None))
            try:
                self._plans[name] = planned_for(
                    self._request.plan, name, self._request.ranks, self._facts.samples, self._facts.rank_threads
                )
            except PlanError as error:
                self._note(name, "refused", str(error))
                continue
            if limit is not None and memory.bytes is not None and memory.bytes > limit:
                needed = f"a rank takes {format_bytes(memory.bytes)} (forecast), and has {format_bytes(limit)}"
                self._note(name, "refused", needed)
                continue
            found.append(name)
        expected = {name: one.step_seconds for name, one in self._predicted.items()}
        return sorted(found, key=lambda name: expected.get(name, math.inf))

    def _note(self, name: str, outcome: Outcome, reason: str) -> None:
        predicted = self._predicted.get(name)
        self._trials[name] = StrategyTrial(strategy=name, outcome=outcome, reason=reason, predicted=predicted)

    def _note_error(self, name: str, error: FlatoutError) -> None:
        if isinstance(error, RanksRefused):
            self._note(name, "refused", str(error))
        elif isinstance(error, TrialEnded):
            self._note(name, "failed", error.headline or f"it ended with code {error.status}")
        else:
            self._note(name, "failed", str(error))

    @property
    def _alone_plan(self) -> Plan:
        """Of one process: with as few threads as a rank, where it is faster so. Threads that compete with other work on
        the machine would make any strategy look good."""
        plan, facts = self._request.plan, self._facts
        own, of_rank = facts.step_seconds, facts.rank_step_seconds
        if plan.threads is not None or own is None or of_rank is None or of_rank > FEWER_THREADS_SHARE * own:
            return plan
        if facts.rank_threads is None or facts.rank_threads == facts.threads:
            return plan
        return plan.with_choice("threads", facts.rank_threads, f"x{own / of_rank:.2f} here in one process")

    def _way(self, name: str) -> Way:
        alone = name == ALONE
        usual_seconds = max(self._start_seconds, self._facts_seconds)
        return Way(
            setup=self._setup,
            spec=self._request.spec,
            plan=self._alone_plan if alone else self._plans[name],
            ranks=1 if alone else self._request.ranks,
            step_seconds=self._step_seconds,
            patience_seconds=max(LEAST_PATIENCE_SECONDS, PATIENT_STARTS * usual_seconds),
            samples=self._facts.samples,
        )

    @property
    def _step_seconds(self) -> float | None:
        """Of one process, as strategies are compared with it; None: it does not fit."""
        fewer = self._alone_plan.threads is not None and self._request.plan.threads is None
        return self._facts.rank_step_seconds if fewer else self._facts.step_seconds

    def _baseline(self, candidates: list[str]) -> Way | None:
        """One process, where it fits; else the first strategy that trains; None: none does."""
        if self._facts.step_seconds is not None:
            return self._way(ALONE)
        for name in candidates:
            way = self._way(name)
            try:
                with way.started():
                    self._note(name, "kept", f"the first that trains, as {ALONE} does not fit")
                    return way
            except BudgetSpent:
                raise
            except FlatoutError as error:
                self._note_error(name, error)
        return None

    def _try(self, name: str, baseline: Way) -> None:
        needed, began = self._trial_seconds + self._end_seconds, self._deadline.elapsed_seconds
        left = self._deadline.seconds_left
        if left < needed:
            takes = f"with the proof it takes about {format_seconds(needed)}"
            self._note(name, "not reached", f"{format_seconds(left)} of the budget were left; {takes}")
            return
        self._progress(f"trying {name} · {format_seconds(left)} left")
        try:
            with self._deadline.stage(f"trying {name}"):
                pairing, peak_bytes = self._timed(baseline, self._way(name))
        except BudgetSpent:
            raise
        except FlatoutError as error:
            self._note_error(name, error)
            return
        verdict = pairing.comparison.verdict
        self._trials[name] = StrategyTrial(
            strategy=name,
            outcome="kept" if verdict == "faster" else "dropped",
            reason={"faster": "", "slower": "slower"}.get(verdict, f"not significant: {pairing.comparison.reason}"),
            predicted=self._predicted.get(name),
            comparison=pairing.comparison,
            baseline_seconds=pairing.baseline_seconds,
            step_seconds=pairing.candidate_seconds,
            peak_bytes=peak_bytes,
            cost_seconds=self._deadline.elapsed_seconds - began,
        )

    def _timed(self, baseline: Way, way: Way) -> tuple[Pairing, int | None]:
        """(one group of ranks against the baseline, peak of the tensors of a rank)"""
        pace = self._pace(max(LEAST_TRIAL_SECONDS, TRIAL_SHARE * self._deadline.seconds_left))
        if (turns := self._turns(baseline, way)) is not None:
            self._open.close()
            self._running = None
            sides = TwoWays(one=baseline, other=way)
            pace = replace(turns.pace, seconds=pace.seconds)
            return compare_whole_runs(sides.baseline, sides.candidate, turns, pace), None
        with way.running() as ranks:
            pairing = compare_arms(self._kept_running(baseline), Arm(ranks, suspended=True), pace)
            try:
                peak_bytes = ranks.peak([]).peak_bytes
            except TrialError:
                peak_bytes = None
        return pairing, peak_bytes

    def _kept_running(self, baseline: Way) -> Arm:
        """The baseline's process, for one trial after the other."""
        if self._running is None or not self._running.alive:
            self._open.close()
            self._running = self._open.enter_context(baseline.running())
            if baseline.ranks == 1:
                self._start_seconds = self._running.startup_seconds or self._start_seconds
        return Arm(self._running, suspended=True)

    def _turns(self, baseline: Way, way: Way) -> FewSteps | None:
        """Steps of the runs in which they take turns, where memory does not suffice for both at once; None where it
        does, or may."""
        memory = self._facts.memory
        alone = memory[ALONE].bytes or 0
        one, several = (memory[strategy_of(each.plan)].bytes or alone // each.ranks for each in (baseline, way))
        if self._request.visible:
            both, limit = one + several, self._limit_bytes
        else:
            both, limit = baseline.ranks * one + way.ranks * several, self._most_bytes(1)
        if limit is None or both <= limit:
            return None
        pace = self._pace(0.0)
        steps = max(LEAST_STEPS_A_TURN, pace.turns * pace.steps)
        return FewSteps(steps=steps, compared=steps)

    def _pace(self, seconds: float) -> Pace:
        return Pace.for_step(self._step_seconds or USUAL_STEP_SECONDS, seconds=seconds)

    @property
    def _pair_seconds(self) -> float:
        """To start one process and a group."""
        return (1 + GROUP_START) * self._start_seconds

    @property
    def _windows_seconds(self) -> float:
        """Of both sides, for the fewest pairs that can decide."""
        return max(LEAST_TRIAL_SECONDS, self._pace(0.0).least_steps * (self._step_seconds or USUAL_STEP_SECONDS))

    @property
    def _trial_seconds(self) -> float:
        return GROUP_START * self._start_seconds + self._windows_seconds

    @property
    def _end_seconds(self) -> float:
        """Of the last comparison and the shortest proof."""
        return 2 * self._pair_seconds + self._windows_seconds + self._proof_seconds(LEAST_STEPS)

    def _proof_seconds(self, steps: int) -> float:
        step_seconds = STEP_OF_PROOF * (self._step_seconds or 0.0)
        return (1 + NUDGES + GROUP_START) * self._start_seconds + (2 + NUDGES) * steps * step_seconds

    def _enough_seconds(self) -> float | None:
        late = sum(one.outcome == "not reached" for one in self._trials.values())
        if not late or self._deadline.stopped:
            return None
        return self._deadline.budget_seconds + late * self._trial_seconds + self._end_seconds

    # what is chosen

    def _best(self, found: StrategiesFound, baseline: Way) -> StrategiesFound:
        """The fastest that holds in new processes and is proved."""
        promising = [one for one in self._trials.values() if one.outcome == "kept" and one.comparison is not None]
        promising.sort(key=lambda one: -(one.comparison.ratio if one.comparison else 0.0))
        if self._deadline.stopped:
            raise BudgetSpent(self._deadline)
        for trial in promising:
            name = trial.strategy
            final = self._final(name, baseline)
            if final is None or final.comparison.verdict != "faster":
                why = "could not be measured" if final is None else not_confirmed(final.comparison)
                self._drop(trial, f"faster in the trial, in new processes {why}")
                continue
            proof = self._proof(name) if baseline.ranks == 1 else None
            if isinstance(proof, str) or (proof is not None and proof.verdict != "equal to rounding"):
                why = proof if isinstance(proof, str) else f"{proof.verdict}: {proof.reason}"
                self._drop(trial, f"x{final.comparison.ratio:.2f} in new processes, but not proved: {why}")
                continue
            for other in list(self._trials.values()):
                if other.outcome == "kept" and other.strategy != name:
                    self._drop(other, f"slower than {name}")
            return self._chosen(found, name, final, proof)
        if baseline.ranks > 1:
            return self._chosen(found, found.baseline, None, None)
        return replace(found, reason=self._why_none())

    def _why_none(self) -> str:
        outcomes = {one.outcome for one in self._trials.values()}
        timed = [one for one in self._trials.values() if one.comparison is not None]
        every = "not reached" not in outcomes
        if timed and every and all(one.comparison and one.comparison.verdict == "slower" for one in timed):
            return "one process is faster here"
        if timed:
            return "one process: no strategy was shown to be faster and right"
        return f"one process: no strategy could be tried ({', '.join(sorted(outcomes))})"

    def _drop(self, trial: StrategyTrial, reason: str) -> None:
        self._trials[trial.strategy] = replace(trial, outcome="dropped", reason=reason)

    def _final(self, name: str, baseline: Way) -> Pairing | None:
        self._progress(f"measuring {name} against {strategy_of(baseline.plan)}, in new processes")
        for_proof = self._proof_seconds(MOST_STEPS) if baseline.ranks == 1 else 0.0
        deadline = self._deadline.reserving(min(for_proof, self._deadline.seconds_left / 2))
        sides, pace = TwoWays(one=baseline, other=self._way(name)), self._pace(deadline.seconds_left)
        try:
            return compare_afresh(sides, pace, deadline, LEAST_TRIAL_SECONDS, self._turns(baseline, sides.other))
        except BudgetSpent:
            raise
        except FlatoutError:
            return None

    def _proof(self, name: str) -> StrategyProof | str:
        """Or why there is none."""
        if self._facts.batch_norms:
            return "batch norms see a rank's share, so that it is another training"
        each = self._proof_seconds(1) - self._proof_seconds(0)
        affordable = int((self._deadline.seconds_left - self._proof_seconds(0)) / max(each, 1e-9))
        steps = max(LEAST_STEPS, min(MOST_STEPS, affordable))
        self._progress(f"proving that {name} trains as one process, over {steps} steps")
        request = self._request
        patience = max(LEAST_PATIENCE_SECONDS, PATIENT_STARTS * (self._proof_seconds(steps) + self._start_seconds))
        try:
            return proved(
                request.spec,
                self._alone_plan,
                self._plans[name],
                request.ranks,
                steps,
                self._facts.samples,
                lambda told, folder: self._run(told, folder, patience),
                self._setup.work_folder,
            )
        except BudgetSpent:
            raise
        except FlatoutError as error:
            return str(error)

    def _chosen(
        self, found: StrategiesFound, name: str, final: Pairing | None, proof: StrategyProof | None
    ) -> StrategiesFound:
        ratio = None if final is None or proof is None else final.comparison.ratio
        why = f"{ALONE} does not fit" if ratio is None else f"x{ratio:.2f} here over one process"
        steps = "" if proof is None else f"; trains as one over {proof.steps} steps; rounding"
        plan = self._plans[name]
        reasons = {**plan.reasons, "parallel": f"{self._request.ranks} ranks: {why}{steps}"}
        return replace(
            found,
            chosen=name,
            reason="",
            plan=replace(
                plan,
                reasons=reasons,
                machine_fingerprint=self._machine.fingerprint,
                machine_name=self._machine.cpu.name,
                torch_version=self._machine.versions.torch,
                speedup=None if ratio is None else (plan.speedup or 1.0) * ratio,
                exactness=None if proof is None else worst(("rounding", plan.exactness or "bit-identical")),
                warnings=(*plan.warnings, f"measured with {self._request.ranks} ranks"),
            ),
            comparison=None if final is None else final.comparison,
            baseline_seconds=None if final is None else final.baseline_seconds,
            step_seconds=None if final is None else final.candidate_seconds,
            proof=proof,
        )
