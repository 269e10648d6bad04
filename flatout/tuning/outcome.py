"""Search, proof and last comparison in turn, and their result: a plan with reasons and warnings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatout.levers.lever import Lever
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.search.search import stopped_by_interrupt
from flatout.timing import LoadWatch
from flatout.tuning.history import load_history
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.results import Proof, SearchState
from flatout.tuning.training_search import TrainingSearch
from flatout.tuning.trials import Trials
from flatout.tuning.verifier import Verifier, busy, least_seconds
from flatout.tuning.windows import Pairing

PROOF_SHARE = 0.4
"""Share of the budget that is reserved for the proof and the last comparison."""
PATIENCE, PATIENCE_SECONDS = 2.0, 30.0
"""What proof and last comparison get after the user stopped the search: this many times their minimum, or this many
seconds if that is more."""
EXACTNESS_OF: dict[str, Exactness] = {
    "bit-identical": "bit-identical",
    "within rounding": "rounding",
    "reduced": "reduced",
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was tried, and what was proved."""

    state: SearchState
    proof: Proof | None
    final: Pairing | None
    """New processes (or copies) without the plan against new ones with it; None where nothing was kept."""
    warnings: tuple[str, ...]


def search_and_prove(
    trials: Trials, machine: Machine, levers: Sequence[Lever], limits: SearchLimits, progress: Callable[[str], None]
) -> Found:
    """`limits.deadline` is the whole budget. Ctrl-C ends only the search, unless a plan is being verified."""
    deadline = limits.deadline
    search_limits = replace(limits, deadline=deadline.reserving(deadline.budget_seconds * PROOF_SHARE))
    history = load_history(machine)
    search = TrainingSearch(trials, machine, levers, search_limits, progress, history)
    state, load = search.state, LoadWatch()
    with stopped_by_interrupt(search.stop, progress) if limits.only is None else contextlib.nullcontext():
        with deadline.stage("the search"):
            try:
                search.run()
            finally:
                contended = busy(load, "the search")
                if contended:
                    history.discard()
                history.save()
        state.warnings += contended
        trials = search.trials
        if state.stopped_after_seconds is not None:
            step_seconds = state.first_observed.step_seconds or 0.0
            needed = least_seconds(step_seconds, state, trials, deadline.budget_seconds)
            deadline = deadline.within(max(PATIENCE * needed, PATIENCE_SECONDS))
        verifier = Verifier(trials, state, deadline, progress, limits.exactness)
        proof, final = verifier.run()
    warnings = (*state.warnings, *verifier.warnings, *filter(None, [history.warning]))
    return Found(state=state, proof=proof, final=final, warnings=warnings)


def plan_of(found: Found, machine: Machine) -> Plan:
    """The plan, measured on this machine."""
    state, proof, final = found.state, found.proof, found.final
    reasons = {}
    for choice in state.kept:
        trial = state.kept_trial(choice.field)
        if trial is not None and choice in state.for_memory and trial.comparison is None:
            reasons[choice.field] = f"{trial.reason}; {trial.exactness}"
        elif trial is not None and trial.comparison is not None:
            reasons[choice.field] = f"x{trial.comparison.ratio:.2f} here; {trial.reason}; {trial.exactness}"
    return Plan(
        **{choice.field: choice.value for choice in state.kept},
        reasons=reasons,
        loop=state.loop,
        machine_fingerprint=machine.fingerprint,
        machine_name=machine.cpu.name,
        torch_version=machine.versions.torch,
        exactness=EXACTNESS_OF.get(proof.verdict) if proof is not None else None,
        proved_reduced=tuple(choice.field for choice in state.kept if choice.relaxed),
        speedup=final.comparison.ratio if final and final.comparison.verdict != "not significant" else None,
        flops_per_step=state.flops_per_step,
        warnings=(*state.warnings, *_weaker(proof)),
    )


def _weaker(proof: Proof | None) -> list[str]:
    """What the proof does not cover."""
    if proof is None:
        return []
    weaker = []
    if not proof.covers_epochs:
        weaker.append(f"proved over {proof.steps} steps, fewer than two epochs: changes between epochs were not seen")
    if proof.verdict == "statistical":
        weaker.append(f"single steps could not be compared, as plain runs of the script differ: {proof.reason}")
    return weaker
