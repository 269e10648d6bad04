"""`flatout whatif train.py`: a script's step on GPUs that are not here, from one step of it on this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.errors import UsageError
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import choices_of_plan
from flatout.plan import Plan
from flatout.predicted_time.prediction import WhatIf
from flatout.profiling.step_operators import StepOperators
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialEnded, TrialHangs, explain_end, no_step_within
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup, terminal_size
from flatout.script.work_folder import work_folder

Precision = Literal["fp32", "tf32", "bf16"]
NEEDED = "a step after the first is followed operator by operator, and one for its memory"


@dataclass(frozen=True, kw_only=True)
class WhatIfRequest:
    """Of which script, and where."""

    target: Target
    devices: Sequence[str] | None = None
    """GPUs of the catalogue; None: some usual ones."""
    precision: Precision | None = None
    """Of the products; None: as the script has them."""
    prices: Mapping[str, float] | None = None
    patience_seconds: float = 1800.0
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False
    stdin_file: Path | None = None


def whatif_script(request: WhatIfRequest, progress: Callable[[str], None]) -> WhatIf:
    """Raises UsageError for a device or a price that is not known and a script that trains on a GPU, TrialError where
    it takes no step or fails."""
    from flatout.predicted_time.predicting import check_devices, of_script

    check_devices(request.devices, request.prices)
    request.target.check()
    plan = Plan(precision="bf16") if request.precision == "bf16" else Plan()
    choices = choices_of_plan(plan.choices(), LEVERS)
    with work_folder() as folder:
        setup = TrialSetup(
            target=request.target,
            work_folder=folder,
            isolation=request.isolation,
            allow_network=request.allow_network,
            stdin_file=request.stdin_file,
            terminal_size=terminal_size() if request.stdin_file is None else None,
        )
        with TrialProcess(setup, label="whatif") as trial:
            try:
                progress(f"starting {request.target.name}")
                trial.start_within(request.patience_seconds)
                progress("following one step")
                step = trial.operators(choices)
                check_precision(request, step)
                progress("following its memory")
                peak = trial.peak(choices).peak_bytes if step.device == "cpu" else None
            except TrialEnded as end:
                raise explain_end(end, request.target.name, needed=NEEDED) from end
            except TrialHangs as hang:
                raise no_step_within(hang, request.target.name) from hang
    if step.device != "cpu":
        raise UsageError(
            f"{request.target.name} trains on {step.device}",
            limit="steps elsewhere are predicted from one that was followed on a CPU",
            remedy="let it choose its device by torch.cuda.is_available(), which whatif answers with False",
        )
    notes = ["waiting for data, copies to the GPU and evaluation are not included"]
    notes.append(
        "memory: all tensors of the script on this CPU, with a data set that is held in tensors; a GPU also holds "
        "torch's context and kernels' workspaces"
    )
    notes += [f"{name} could not be applied: {why}" for name, why in step.rolled_back.items()]
    if step.fault:
        notes.append(f"not the whole step was followed: {step.fault}")
    return of_script(
        step,
        name=request.target.name,
        devices=request.devices,
        tf32=request.precision == "tf32" or (request.precision is None and step.tf32),
        peak_bytes=peak,
        prices=request.prices,
        notes=notes,
    )


def check_precision(request: WhatIfRequest, step: StepOperators) -> None:
    """UsageError where the script casts its products itself, so that they are not in the precision asked for."""
    from flatout.predicted_time.predicting import half_products

    if request.precision in ("fp32", "tf32") and (half := half_products(step.operators)):
        raise UsageError(
            f"--precision {request.precision}, but {request.target.name} itself computes products in {half}",
            limit="what it casts is not undone",
            remedy="leave --precision out, or turn its autocast off",
        )
