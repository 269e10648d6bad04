"""`flatout.choose_parallel`: find how several ranks best share the training of one model.

found = flatout.choose_parallel("train.py:make", ranks=4, seconds=120)
found.plan, found.speedup, found.trials
print(found.summary())
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout import environment
from flatout.arguments import as_plan, as_seconds, as_whole_number, wrong
from flatout.errors import UsageError
from flatout.infer.model_source import name_of_object
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.notebook_tables import ShownAsText
from flatout.plan import Plan
from flatout.report.strategies_text import strategies_text
from flatout.script.replicas.starting import device_count
from flatout.script.trial.process import in_ranks
from flatout.script.work_folder import require_linux
from flatout.search.search import Progress
from flatout.strategies.choosing import StrategiesRequest, choose_strategy
from flatout.strategies.found import StrategiesFound


@dataclass(frozen=True, kw_only=True, repr=False)
class ParallelChoice(ShownAsText, StrategiesFound):
    """What `flatout.choose_parallel` found: the plan, what was tried, and the proof that ranks train as one process."""

    machine: Machine

    def summary(self) -> str:
        """The whole result on one screen."""
        return strategies_text(self, self.machine)

    def __str__(self) -> str:
        return self.summary()


def choose_parallel(
    training: str,
    *,
    ranks: int | str = "auto",
    plan: Plan | None = None,
    seconds: float = 300.0,
    progress: Progress | None = None,
) -> ParallelChoice:
    """Try how `ranks` processes best share the training of one model: `parallel` of a plan.

    training: 'train.py:make' or 'package.module:make', a function that is called with a plan and returns (TrainStep,
    batches), both made with that plan. It is called in processes of their own, whose files stay as they are. ranks:
    on GPUs of this machine, one each ("auto": all), or processes that share the cores of its CPU. plan: of one process;
    what it sets is in force everywhere. seconds: for all of it, the proof included. progress: called with a line of
    text.

    "ddp", "zero1", "fsdp", "tensor", "pipeline" and, from four ranks on, "fsdp" with `tensor_ranks` are tried, as far
    as the model, the plan and the memory allow: each beside one process, in steps of the same batches. What is faster
    is measured again in new processes, and its losses and weights are compared with those of one process.

    Returns a ParallelChoice: `plan` (with `parallel`, where a strategy was chosen), `chosen`, `speedup`, `trials`,
    `proof`, `summary()`. Raises UsageError for a function that cannot be used, ScriptError where it fails.
    """
    if not isinstance(training, str):
        raise wrong("training", training, "it names a function: 'train.py:make'", "it is called in other processes")
    if ranks != "auto":
        as_whole_number(ranks, "ranks")
    asked = strategies_asked(training, str(ranks), as_plan(plan, "step"), as_seconds(seconds))
    return choose_requested(asked, progress or (lambda text: None))


def strategies_asked(
    training: str, ranks: str, plan: Plan, budget_seconds: float, *, on_cpu: bool = False, allow_network: bool = False
) -> StrategiesRequest:
    """ranks: '2' or 'auto'. UsageError where there are not so many devices, where one is asked for, and where the plan
    has a strategy already."""
    require_linux()
    if environment.rank() is not None:
        raise in_ranks()
    if plan.parallel is not None:
        raise UsageError(
            f"the plan has parallel = {plan.parallel!r}", limit="that is what is chosen", remedy="leave it out"
        )
    count, visible = device_count(ranks, on_cpu=on_cpu)
    if count == 1:
        raise UsageError("one rank", limit="there is nothing to share", remedy="use at least two")
    name_of_object(training, "training")
    return StrategiesRequest(
        spec=training,
        ranks=count,
        plan=plan,
        budget_seconds=budget_seconds,
        allow_network=allow_network,
        visible=visible,
    )


def choose_requested(request: StrategiesRequest, progress: Progress) -> ParallelChoice:
    machine = detect()
    found = choose_strategy(request, machine, progress)
    return ParallelChoice(machine=machine, **vars(found))
