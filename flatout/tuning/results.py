"""The results of tuning: what was observed and tried, the proof of what was kept, and the plan.

Proof         losses, gradients and weights of new processes, compared with the script's own spread
SearchState   what a search knows, and at its end everything it tried
Tuned         the plan with all of that, of a script or a training step
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from flatout.levers.lever import Choice, Graph
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.script.entry import Target
from flatout.search.lines import BudgetOption, nothing_found, seconds_argument
from flatout.search.trial import Record, Trial
from flatout.statistics import Comparison
from flatout.tuning.devices.found import DevicesTuned
from flatout.tuning.fitting import Fit
from flatout.tuning.whole_run import WholeRun
from flatout.tuning.windows import FewSteps, Pairing

ProofVerdict = Literal["bit-identical", "within rounding", "reduced", "statistical", "rejected"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What some levers claim about the numbers, and the verdict."""

    levers: tuple[str, ...]
    """Labels of the levers with this claim; they were tested on top of those with stricter claims."""
    claimed: Exactness
    verdict: ProofVerdict
    reason: str
    may_be_reduced: bool = False
    """Of a rejected claim: the check steps are consistent with the weakest claim, 'reduced'."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How far a candidate's numbers are from the plain script's, and how far plain runs are from one another.

    Each claim is proved by itself, strictest first; `verdict` is the weakest of them, or the first that failed. Figures
    are relative: losses to the median loss, gradients to their norm. A `floor` is the script's own: the effect of one
    rounding error in the weights.
    """

    verdict: ProofVerdict
    reason: str
    steps: int
    """The horizon: later steps were not compared."""
    epochs: float | None = None
    """The horizon in passes over the training loader; None: the script has no loader, or its length is unknown."""
    claims: tuple[Claim, ...] = ()
    loss_difference: float | None = None
    loss_floor: float | None = None
    gradient_difference: float | None = None
    gradient_floor: float | None = None
    loss_drift: float | None = None
    """Mean of (candidate - plain) loss over the later half of a free run, relative to the plain level."""
    resolution: float | None = None
    """The smallest relative difference in loss that would have been detected; only with a statistical verdict."""
    repeatable: bool | None = None
    """Did two plain runs give the same bits? None: not tested, as every claim allows rounding."""
    notes: tuple[str, ...] = ()
    baseline_losses: tuple[float | None, ...] = ()
    candidate_losses: tuple[float | None, ...] = ()

    @property
    def holds(self) -> bool:
        return self.verdict != "rejected"

    @property
    def covers_epochs(self) -> bool:
        """Did it cover at least two epochs?"""
        return self.epochs is None or self.epochs >= 2

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class SearchState(Record[Choice]):
    """What a search knows so far, and its result."""

    for_memory: list[Choice] = field(default_factory=list)
    """Kept choices that need not be faster: they save memory that is short, or were asked for."""
    fit: Fit | None = None
    """Where steps must fit under a memory limit."""
    observed: Observed = field(default_factory=Observed)
    first_observed: Observed = field(default_factory=Observed)
    loop: str | None = None
    """What trains, as observed in the first plain step."""
    total_steps: int | None = None
    few_steps: FewSteps | None = None
    """The script's length, where it is so short that whole runs are compared."""
    isolation: dict[str, object] = field(default_factory=dict)
    startup_seconds: float | None = None
    """Of the script in a new process, until the first step is recognized."""
    compiled_graphs: set[Graph] = field(default_factory=set)
    """What trials compiled, which later processes find in the cache."""
    warnings: list[str] = field(default_factory=list)

    @property
    def flops_per_step(self) -> float | None:
        """Of the matrix products of a plain step; None if they could not be counted."""
        return self.first_observed.flops_per_step


@dataclass(frozen=True, kw_only=True)
class StepSubject:
    """A training step of the user's own loop."""

    model: str
    """Its class."""
    batches: int
    """How many were read, and used repeatedly."""

    @property
    def name(self) -> str:
        return self.model


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The plan, with all the evidence."""

    plan: Plan
    """For `flatout run` or TrainStep; includes what a step's own plan said about batches and loading."""
    subject: Target | StepSubject
    machine: Machine
    state: SearchState
    proof: Proof | None
    """None where nothing was kept."""
    final: Pairing | None
    """The last comparison, plain against planned, in new processes or on new copies, on one device; None where there
    was none."""
    budget_seconds: float
    seconds: float
    """How long the tune took."""
    whole: WholeRun | None = None
    """What the plan is worth over a whole run of a script, start-up included; on one device."""
    devices: DevicesTuned | None = None
    """How it compares with several devices; None: that was not asked for."""
    ranks: int | None = None
    """In how many ranks the script trains by itself; None: it is started by python alone."""
    warnings: tuple[str, ...] = ()

    @property
    def speedup(self) -> Comparison | None:
        """Speedup of a step under the plan, with its confidence interval; None: see `reason`."""
        return None if self.final is None or not self.state.kept else self.final.comparison

    @property
    def reason(self) -> str:
        """Why there is no `speedup`; '' where there is one."""
        return self.no_speedup_because(seconds_argument)

    def no_speedup_because(self, option: BudgetOption) -> str:
        """The same; `option`: how a larger budget is given."""
        if not self.state.kept:
            return nothing_found(self.state, self.budget_seconds, option)
        if self.final is None:
            return "kept levers were faster one by one, but their combination could not be measured"
        return ""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Everything that was tried, in order."""
        return tuple(self.state.trials)

    @property
    def fits(self) -> bool:
        """False where a memory limit was given and the plan was not shown to meet it."""
        return self.state.fit is None or self.state.fit.holds

    @property
    def peak_resident_bytes(self) -> tuple[int, int] | None:
        """Of the last comparison's processes, (plain, planned); None where there is no speedup, where they were not
        compared in processes of their own, and where the tensors are on a GPU."""
        on_cpu = self.state.first_observed.device.startswith("cpu")
        if self.final is None or self.speedup is None or not on_cpu:
            return None
        return self.final.peak_resident_bytes

    @property
    def baseline_seconds(self) -> float | None:
        return self.final.baseline_seconds if self.final else self.state.first_observed.step_seconds

    @property
    def best_seconds(self) -> float | None:
        return self.final.candidate_seconds if self.final else self.baseline_seconds
