"""The proof that several devices train as one, in a process that starts the ranks: `flatout.tuning.devices_proof`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flatout.decoding import decode
from flatout.errors import FlatoutError
from flatout.levers.lever import Choice
from flatout.search.deadline import BudgetSpent
from flatout.tuning.devices.basis import RANKS_START, Basis
from flatout.tuning.devices_proof import STEPS, DevicesProof
from flatout.tuning.ranks.job import JobRequest

SHARE = 0.4
"""Of the time that is left."""
LEAST_STEPS = 12
RUNS, TIMES = 3, 1.5
"""Runs on one device, and how many times as long as a plain step one of the proof takes."""


def proof_seconds(basis: Basis, steps: int) -> float:
    starts = (RUNS + RANKS_START) * basis.start_seconds
    return starts + (RUNS + 1) * TIMES * steps * basis.step_seconds


def proof_steps(basis: Basis) -> int:
    """As many as time allows."""
    available = SHARE * basis.deadline.seconds_left
    fixed, each = proof_seconds(basis, 0), proof_seconds(basis, 1) - proof_seconds(basis, 0)
    return max(LEAST_STEPS, min(STEPS, int((available - fixed) / each)))


def proved(basis: Basis, devices: int, in_ranks: Sequence[Choice]) -> DevicesProof | str:
    """The proof, under these levers on one device and in each rank; or why there is none. Raises BudgetSpent where it
    is not wanted any more."""
    steps = proof_steps(basis)
    basis.progress(f"proving that {devices} devices train as one, over {steps} steps")
    choices = tuple(tuple(choice.to_json()) for choice in in_ranks)
    settings = replace(basis.settings, levers=basis.setup.levers, choices=choices)
    request = JobRequest(
        kind="proof",
        target=basis.setup.target,
        devices=devices,
        allow_network=basis.setup.allow_network,
        steps=steps,
    )
    try:
        return decode(DevicesProof, basis.result_of(request, settings))
    except BudgetSpent:
        raise
    except FlatoutError as error:
        return f"not proved: {error}"
