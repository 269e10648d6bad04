"""`flatout tune`: search, prove the winner in fresh processes, measure it against the plain script, make a plan.

result = tune(request, machine, progress=print)
result.plan, result.proof, result.comparison
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flatout.environment import inductor_folder
from flatout.errors import TrialError
from flatout.levers.lever import EXACTNESS_ORDER, Choice
from flatout.machine.description import Machine
from flatout.plan import Exactness, Plan
from flatout.script.entry import Target
from flatout.script.trial_child import load_levers
from flatout.script.work_folder import work_folder
from flatout.timing import LoadWatch
from flatout.tune.proof import Numerics, judge
from flatout.tune.search import Search, SearchLimits, SearchState
from flatout.tune.trial import Proof
from flatout.tune.trial_process import TrialEnded, TrialProcess, TrialSetup
from flatout.tune.windows import Arm, Pace, Pairing, compare_arms

PROOF_SHARE = 0.4
"""Of the budget: what is kept back for the proof and the last comparison."""
PROOF_STEPS, PROOF_STEPS_REDUCED, LEAST_PROOF_STEPS = 300, 500, 8
GRADIENT_STEPS = 2

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What to tune and within which bounds."""

    target: Target
    budget_seconds: float = 600.0
    exactness: Exactness = "reduced"
    total_steps: int | None = None
    levers: str = "flatout.levers.catalogue:LEVERS"
    only: tuple[tuple[str, Any], ...] | None = None
    """Restrict the search to these (plan field, value) choices: how a plan from elsewhere is verified."""
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False
    """Trials have only a loopback interface otherwise, each its own."""
    stdin_file: Path | None = None
    log_folder: Path | None = None
    hang_floor_seconds: float = 30.0


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """Everything that was found out."""

    request: TuneRequest
    machine: Machine
    state: SearchState
    plan: Plan
    proof: Proof | None
    final: Pairing | None
    """Fresh plain process against fresh process with the plan; None where nothing was kept."""
    seconds: float
    warnings: tuple[str, ...] = ()
    log_folder: Path | None = None

    @property
    def baseline_seconds(self) -> float | None:
        return self.final.baseline_seconds if self.final else self.state.first_observed.step_seconds

    @property
    def best_seconds(self) -> float | None:
        return self.final.candidate_seconds if self.final else self.baseline_seconds


def tune(request: TuneRequest, machine: Machine, progress: Progress = lambda text: None) -> TuneResult:
    """Tune one script. Changes nothing of the user's; whoever calls it writes the plan."""
    request.target.check()
    began = time.monotonic()
    with work_folder() as folder:
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            shared=_shared_folders(),
            levers=request.levers,
            isolation=request.isolation,
            allow_network=request.allow_network,
            stdin_file=request.stdin_file,
            hang_floor_seconds=request.hang_floor_seconds,
            terminal_size=_terminal_size(),
        )
        limits = SearchLimits(
            seconds=request.budget_seconds * (1 - PROOF_SHARE),
            exactness=request.exactness,
            total_steps=request.total_steps,
            only=request.only,
        )
        search = Search(setup, machine, load_levers(request.levers), limits, progress)
        load = LoadWatch()
        state = search.run()
        state.warnings += _busy(load, "the search")
        verifier = Verifier(setup, state, request.budget_seconds * PROOF_SHARE, progress)
        proof, final = verifier.run()
        return TuneResult(
            request=request,
            machine=machine,
            state=state,
            plan=_plan(request, machine, state, proof, final),
            proof=proof,
            final=final,
            seconds=time.monotonic() - began,
            warnings=(*state.warnings, *verifier.warnings),
            log_folder=_keep_logs(folder, request.log_folder),
        )


class Verifier:
    """Fresh processes: are the numbers of the winner right, and is it really faster?"""

    def __init__(self, setup: TrialSetup, state: SearchState, seconds: float, progress: Progress) -> None:
        self.setup, self.state, self.seconds, self._progress = setup, state, seconds, progress
        self.warnings: list[str] = []
        self._plain: list[Numerics] = []
        self._proved = 0
        """Levers in the set that was proved and then partly given back."""

    def run(self) -> tuple[Proof | None, Pairing | None]:
        proof: Proof | None = None
        while self.state.kept:
            proof = self._prove(self.state.kept)
            if proof.holds:
                break
            guilty, reason = self._find_guilty(proof)
            self._take_back(guilty, reason)
        if not self.state.kept:
            return None, None
        final = self._final_comparison()
        if final is not None and final.comparison.verdict != "faster":
            self._progress("not clear yet; measuring once more")
            final = self._final_comparison() or final
        if final is not None and final.comparison.verdict != "faster":
            self._give_back(final)
            return self._for_memory(proof, final)
        return proof, final

    def _for_memory(self, proof: Proof | None, final: Pairing) -> tuple[Proof | None, Pairing | None]:
        """What is left when nothing is faster: levers that save memory, if their numbers hold without the others."""
        if not self.state.kept:
            return None, None
        if len(self.state.kept) < self._proved:
            proof = self._prove(self.state.kept)
            if not proof.holds:
                for choice in list(self.state.kept):
                    self._take_back(choice, proof.reason)
                return None, None
            final = self._final_comparison() or final
        return proof, final

    def _give_back(self, final: Pairing) -> None:
        """No gain in time that could not be shown in fresh processes goes into a plan."""
        found = final.comparison
        reason = f"faster in the search, but the whole was not in fresh processes (x{found.ratio:.2f}, {found.verdict})"
        lasting = {choice.field for choice in self.state.for_memory}
        self._proved = len(self.state.kept)
        self.state.kept = [choice for choice in self.state.kept if choice in self.state.for_memory]
        self.state.trials = [
            replace(trial, outcome="dropped", reason=reason)
            if trial.outcome == "kept" and not set(trial.plan_field.split("+")) <= lasting
            else trial
            for trial in self.state.trials
        ]

    def _steps(self) -> int:
        """As many as fit into the time kept back: four runs, plain speed, recording makes them a little slower."""
        worst = PROOF_STEPS_REDUCED if self._claimed(self.state.kept) == "reduced" else PROOF_STEPS
        step = self.state.first_observed.step_seconds or 0.01
        startup = 4 * (self.state.startup_seconds or 0.0)
        available = max(0.0, 0.7 * self.seconds - startup)
        return max(LEAST_PROOF_STEPS, min(worst, int(available / (5 * 1.3 * step))))

    def _claimed(self, choices: Sequence[Choice]) -> Exactness:
        return max((choice.lever.exactness for choice in choices), key=EXACTNESS_ORDER.index, default="bit-same")

    def _prove(self, choices: Sequence[Choice]) -> Proof:
        steps = self._steps() if not self._plain else self._plain[0].steps
        if not self._plain:
            for number, nudge in enumerate((False, False, True), start=1):
                self._progress(f"proof: plain run {number} of 3, {steps} steps")
                self._plain.append(self._record([], steps, nudge=nudge))
        self._progress(f"proof: run with {', '.join(choice.label for choice in choices)}")
        try:
            candidate = self._record(choices, steps, nudge=False)
        except TrialError as error:
            text = error.error.strip().splitlines()[-1:] if isinstance(error, TrialEnded) else [str(error)]
            reason = f"a fresh run with it failed: {text[0] if text else error}"
            return Proof(verdict="rejected", reason=reason, steps=0)
        plain, again, nudged = self._plain
        return judge(plain, again, nudged, candidate, claimed=self._claimed(choices))

    def _record(self, choices: Sequence[Choice], steps: int, *, nudge: bool) -> Numerics:
        from_start = [choice for choice in choices if choice.lever.switch != "live"]
        live = [choice for choice in choices if choice.lever.switch == "live"]
        with TrialProcess(self.setup, from_start, label="proof") as process:
            process.start()
            answer = process.numerics(live, steps=steps, nudge=nudge, gradient_steps=GRADIENT_STEPS)
        return Numerics.from_answer(answer)

    def _find_guilty(self, proof: Proof) -> tuple[Choice, str]:
        """The first lever with which the numbers go wrong: by halves, over growing prefixes of what was kept."""
        kept = self.state.kept
        low, high, reason = 0, len(kept), proof.reason  # the first `low` hold, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            self._progress(f"the numbers are off; which lever is it? ({high - low} left)")
            partial = self._prove(kept[:middle])
            if partial.holds:
                low = middle
            else:
                high, reason = middle, partial.reason
        return kept[high - 1], reason

    def _take_back(self, guilty: Choice, reason: str) -> None:
        self.state.kept = [choice for choice in self.state.kept if choice != guilty]
        self.state.trials = [
            replace(trial, outcome="failed", reason=f"numbers: {reason}")
            if trial.outcome == "kept" and guilty.field in trial.plan_field.split("+")
            else trial
            for trial in self.state.trials
        ]

    def _final_comparison(self) -> Pairing | None:
        """Plain against planned, each in a process that runs so from its start."""
        self._progress("measuring the winner against the plain script, in fresh processes")
        load = LoadWatch()
        live = [choice for choice in self.state.kept if choice.lever.switch == "live"]
        from_start = [choice for choice in self.state.kept if choice.lever.switch != "live"]
        pace = Pace.for_step(self.state.first_observed.step_seconds or 0.01, seconds=max(5.0, 0.15 * self.seconds))
        pace = replace(pace, most_pairs=25, least_pairs=8, stop_when_futile=False)
        try:
            with (
                TrialProcess(self.setup, label="plain") as plain,
                TrialProcess(self.setup, from_start, label="planned") as planned,
            ):
                plain.start()
                planned.start()
                return compare_arms(Arm(plain), Arm(planned, live), pace)
        except TrialError as error:
            self.warnings.append(f"the last comparison in fresh processes was cut short: {error}")
            return None
        finally:
            self.warnings += _busy(load, "the last comparison")


def _busy(load: LoadWatch, when: str) -> list[str]:
    """Levers that help on a machine that others use (fewer threads, say) need not help on a quiet one."""
    found = load.read()
    if found is None or not found.contended:
        return []
    return [
        f"others kept {found.others_cores:.1f} of {found.logical_cores} cores busy during {when}: "
        "this holds for such a machine; tune again when it is quiet"
    ]


def _plan(
    request: TuneRequest, machine: Machine, state: SearchState, proof: Proof | None, final: Pairing | None
) -> Plan:
    reasons = {}
    for choice in state.kept:
        trial = next((t for t in state.trials if t.outcome == "kept" and choice.field in t.plan_field.split("+")), None)
        if trial is not None and trial.comparison is not None:
            reasons[choice.field] = f"x{trial.comparison.ratio:.2f} here; {trial.reason}; {trial.exactness}"
    return Plan(
        **{choice.field: choice.value for choice in state.kept},
        reasons=reasons,
        script=request.target.name,
        argv=request.target.arguments,
        machine_fingerprint=machine.fingerprint,
        machine_name=machine.cpu.name,
        torch_version=machine.versions.torch,
        exactness=_plan_exactness(proof),
        speedup=final.comparison.ratio if final and final.comparison.verdict != "not significant" else None,
        flops_per_step=state.flops_per_step,
        warnings=tuple(state.warnings),
    )


def _plan_exactness(proof: Proof | None) -> Exactness | None:
    names: dict[str, Exactness] = {"bit-same": "bit-same", "within rounding": "rounding", "reduced": "reduced"}
    return names.get(proof.verdict) if proof is not None else None


def _terminal_size() -> tuple[int, int] | None:
    """(rows, columns) of the terminal that the script would read from, had it been started by itself."""
    try:
        size = os.get_terminal_size(0)
    except OSError:
        return None
    return size.lines, size.columns


def _shared_folders() -> tuple[Path, ...]:
    """What trials may leave behind on purpose: compiled kernels, in our own cache, so that a run finds them."""
    return (inductor_folder(),)


def _keep_logs(folder: Path, wanted: Path | None) -> Path | None:
    if wanted is None:
        return None
    wanted.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*/output.log"):
        shutil.copyfile(log, wanted / f"{log.parent.name}.log")
    return wanted
