"""`flatout tune`: search, prove the winner in fresh processes, measure it against the plain script, make a plan.

result = tune(request, machine, progress=print)
result.plan, result.proof, result.comparison
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.environment import inductor_folder
from flatout.machine.description import Machine
from flatout.plan import Exactness, Plan
from flatout.script.entry import Target
from flatout.script.trial_child import load_levers
from flatout.script.work_folder import work_folder
from flatout.timing import LoadWatch
from flatout.tune.deadline import Deadline
from flatout.tune.search import Search, SearchLimits, SearchState
from flatout.tune.trial import Proof
from flatout.tune.trial_process import TrialSetup
from flatout.tune.verifier import Verifier, busy
from flatout.tune.whole_run import WholeRun
from flatout.tune.windows import Pairing

PROOF_SHARE = 0.4
"""Of the budget: what is kept back for the proof and the last comparison."""

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
    whole: WholeRun | None = None
    warnings: tuple[str, ...] = ()
    log_folder: Path | None = None

    @property
    def baseline_seconds(self) -> float | None:
        return self.final.baseline_seconds if self.final else self.state.first_observed.step_seconds

    @property
    def best_seconds(self) -> float | None:
        return self.final.candidate_seconds if self.final else self.baseline_seconds


def tune(
    request: TuneRequest,
    machine: Machine,
    progress: Progress = lambda text: None,
    deadline: Deadline | None = None,
) -> TuneResult:
    """Tune one script. Changes nothing of the user's; whoever calls it writes the plan.

    `deadline`: where some of the budget was spent before this call; None: all of it is left.
    """
    request.target.check()
    deadline = deadline or Deadline(request.budget_seconds)
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
            deadline=deadline,
        )
        limits = SearchLimits(
            deadline=deadline.reserving(request.budget_seconds * PROOF_SHARE),
            exactness=request.exactness,
            total_steps=request.total_steps,
            only=request.only,
        )
        search = Search(setup, machine, load_levers(request.levers), limits, progress)
        load = LoadWatch()
        with deadline.stage("the search"):
            state = search.run()
        state.warnings += busy(load, "the search")
        verifier = Verifier(setup, state, deadline, progress)
        proof, final = verifier.run()
        whole = verifier.whole_run(final)
        return TuneResult(
            request=request,
            machine=machine,
            state=state,
            plan=_plan(request, machine, state, proof, final),
            proof=proof,
            final=final,
            whole=whole,
            seconds=deadline.elapsed_seconds,
            warnings=(*state.warnings, *verifier.warnings, *filter(None, [deadline.explanation])),
            log_folder=_keep_logs(folder, request.log_folder),
        )


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
        loop=state.loop,
        machine_fingerprint=machine.fingerprint,
        machine_name=machine.cpu.name,
        torch_version=machine.versions.torch,
        exactness=_plan_exactness(proof),
        speedup=final.comparison.ratio if final and final.comparison.verdict != "not significant" else None,
        flops_per_step=state.flops_per_step,
        warnings=(*state.warnings, *_weaker(proof)),
    )


def _weaker(proof: Proof | None) -> list[str]:
    """What the plan's claim does not cover."""
    if proof is None:
        return []
    weaker = []
    if not proof.covers_epochs:
        weaker.append(
            f"proved over {proof.steps} steps, less than two epochs: what changes between epochs was not seen"
        )
    if proof.verdict == "statistical":
        weaker.append(f"no step could be compared, as the script does not repeat itself: {proof.reason}")
    return weaker


def _plan_exactness(proof: Proof | None) -> Exactness | None:
    names: dict[str, Exactness] = {
        "bit-identical": "bit-identical",
        "within rounding": "rounding",
        "reduced": "reduced",
    }
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
