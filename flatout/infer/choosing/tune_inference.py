"""Choose how to run a model: each inference lever is measured on the user's own sample and kept close to fp32.

    found = flatout.tune_inference(model, sample_inputs, items=100_000)
    print(found.summary())
    for output in flatout.predict(model, inputs, found.plan): ...

A choice that is slower, not significantly faster, too far from fp32, or does not pay off within the items to be served
is left out, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import nn
from torch.types import Device

from flatout.arguments import as_exactness, as_function, as_model, as_plan, as_seconds, as_whole_number
from flatout.errors import UsageError
from flatout.infer.choosing.closeness import Accuracy, Tolerance
from flatout.infer.choosing.inference_search import InferenceSearch, Limits, Option
from flatout.infer.choosing.tuned_generation import TunedGeneration
from flatout.infer.choosing.tuned_prediction import TunedPrediction
from flatout.infer.generation.families import read_decoder
from flatout.infer.generation.prompts import read_prompts
from flatout.infer.left_unchanged import left_unchanged
from flatout.infer.tokenizer_source import Tokenizer
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.notebook_tables import ShownAsText
from flatout.plan import Plan
from flatout.plan_choices import Exactness, worst
from flatout.search.deadline import Deadline
from flatout.search.lines import (
    BudgetOption,
    not_tried_lines,
    nothing_found,
    ratio_text,
    reach_lines,
    seconds_argument,
    trial_lines,
)
from flatout.search.search import stopped_by_interrupt
from flatout.search.trial import Record, Trial
from flatout.statistics import Comparison
from flatout.timing import LoadWatch
from flatout.units import format_seconds, labelled

Task = Literal["predict", "generate"]
FEW_ANSWERS = 100


@dataclass(frozen=True, kw_only=True, repr=False)
class InferenceTuning(ShownAsText):
    """The plan, and the evidence for it."""

    plan: Plan
    """To save, or to pass to `predict` or TokenGenerator."""
    task: Task
    task_reason: str
    model: str
    """Its class."""
    unit: str
    """What a time refers to: "item" or "prompt"."""
    sample: str
    """What was measured, in words."""
    state: Record[Option]
    """What was tried, and what was not and why."""
    tolerance: Tolerance
    items: int | None
    """How many will be served; None: unknown."""
    plain_seconds: float
    """One item, under the plan that was given (or none)."""
    chosen_seconds: float
    """One item under the new plan, in windows that alternated with plain ones."""
    comparison: Comparison | None
    """Of those windows; None where nothing was kept."""
    plain_accuracy: Accuracy
    """Of the unchanged model, against fp32."""
    accuracy: Accuracy
    """Under the new plan."""
    share: str
    """Share of the binding limit that the new plan reaches, in words."""
    machine_fingerprint: str
    machine_name: str
    torch_version: str | None
    budget_seconds: float
    seconds: float
    """Of the whole tuning."""
    notes: tuple[str, ...] = field(default=())

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self.state.trials)

    @property
    def kept(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.outcome == "kept")

    def summary(self, option: BudgetOption = seconds_argument) -> str:
        """One screen. option: how a larger budget is given."""
        rows = [("model", f"{self.model} · {self.task}: {self.task_reason}"), ("sample", self.sample)]
        rows += labelled("tried", trial_lines(self.trials))
        rows += labelled("not tried", not_tried_lines(self.state.not_tried))
        rows += labelled("result", [*self._result(option), *reach_lines(self.state, option)])
        rows += labelled("note", list(self.notes))
        return "\n".join(f"{label:<10}{text}" for label, text in rows)

    def __str__(self) -> str:
        return self.summary()

    def _result(self, option: BudgetOption) -> list[str]:
        if self.comparison is None:
            found = nothing_found(self.state, self.budget_seconds, option)
            return [f"{found}: {format_seconds(self.plain_seconds)} per {self.unit} as it is", self.share]
        chosen = ", ".join(f"{name} = {value}" for name, value in self.plan.choices().items())
        times = f"{format_seconds(self.plain_seconds)} -> {format_seconds(self.chosen_seconds)} per {self.unit}"
        speed = f"{ratio_text(self.comparison)} ({times}, {self.comparison.pairs} pairs of windows)"
        return [chosen, speed, self.share, f"against fp32: {self.accuracy}"]

    def to_json(self) -> dict[str, object]:
        """Everything but the plan's reasons, which are the trials'."""
        return {
            "task": self.task,
            "task_reason": self.task_reason,
            "model": self.model,
            "unit": self.unit,
            "sample": self.sample,
            "plan": self.plan.choices(),
            "exactness": self.plan.exactness,
            "speedup": self.plan.speedup,
            "trials": [trial.to_json() for trial in self.trials],
            "not_tried": [entry.to_json() for entry in self.state.not_tried],
            "budget_seconds": self.budget_seconds,
            "tolerance": self.tolerance.to_json(),
            "items": self.items,
            "plain_seconds": self.plain_seconds,
            "chosen_seconds": self.chosen_seconds,
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "plain_accuracy": self.plain_accuracy.to_json(),
            "accuracy": self.accuracy.to_json(),
            "share": self.share,
            "machine_fingerprint": self.machine_fingerprint,
            "machine_name": self.machine_name,
            "torch_version": self.torch_version,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def tune_inference(
    model: nn.Module,
    sample_inputs: object,
    *,
    task: Task | None = None,
    plan: Plan | None = None,
    items: int | None = None,
    exactness: Exactness = "reduced",
    max_error: float = Tolerance.max_error,
    min_agreement: float = Tolerance.min_agreement,
    max_divergence: float = Tolerance.max_divergence,
    seconds: float = 300.0,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 64,
    batch_size: int | None = None,
    device: Device = None,
    scores: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> InferenceTuning:
    """Measure which choices make this model faster on inputs like these; returns a plan with the evidence.

    sample_inputs: as for `predict`, or prompts as for `generate`: a few hundred that resemble what will be served.
    task: "predict" or "generate"; None: guessed from the model and the inputs, and reported. plan: choices that are
    fixed; the others are tried on top.

    items: how many inputs (or prompts) will be served; a choice whose start-up costs more than it saves on these is
    dropped. exactness: what may be tried: "bit-identical", "rounding" (another order of summation), "reduced" (fewer
    bits). max_error, min_agreement, max_divergence: the largest loss against fp32 on the sample (see closeness.py):
    5 % of the outputs' spread, 99 % of the answers, 0.01 nats. scores: whether outputs are scores of answers (classes,
    tokens); None: guessed. seconds: for everything, except a compilation that has begun. tokenizer,
    max_new_tokens: of generation. batch_size, device: of `predict`. progress: called with a line.

    The model, its mode and the random state are not changed. A choice that fails, also for lack of memory, is a
    dropped trial; Ctrl-C ends the search with the results so far. Raises UsageError for an argument or a sample that
    cannot be used, and what the model itself raises.
    """
    why = "as asked"
    _check(model, task, plan, exactness, seconds)
    deadline = Deadline(seconds)
    items = None if items is None else as_whole_number(items, "items")
    max_new_tokens = as_whole_number(max_new_tokens, "max_new_tokens")
    tolerance = Tolerance(max_error=max_error, min_agreement=min_agreement, max_divergence=max_divergence)
    if task is None:
        task, why, sample_inputs = _guess(model, sample_inputs, tokenizer)
    base = as_plan(plan, task)
    if scores not in (None, True, False):
        raise UsageError(f"scores is {scores!r}", limit="it is True, False or None")
    if progress is not None:
        as_function(progress, "progress", 1, limit="it is called with a line of text")
    say, machine, load = progress or (lambda text: None), detect(), LoadWatch()
    with left_unchanged(model):
        say("running the model as it is, and in fp32")
        if task == "generate":
            subject: TunedGeneration | TunedPrediction = TunedGeneration(
                model,
                sample_inputs,
                base=base,
                budget_seconds=seconds,
                tokenizer=tokenizer,
                max_new_tokens=max_new_tokens,
            )
        else:
            subject = TunedPrediction(
                model,
                sample_inputs,
                base=base,
                budget_seconds=seconds,
                batch_size=batch_size,
                device=device,
                scores=scores,
            )
        limits = Limits(seconds=seconds, exactness=exactness, tolerance=tolerance, items=items)
        search = InferenceSearch(subject, base, subject.options(machine), limits, say, deadline=deadline)
        with stopped_by_interrupt(search.stop, say):
            search.run()
    doubts, took = _doubts(search, load), deadline.elapsed_seconds
    found = _tuning(search, (task, why), machine, budget_seconds=seconds, seconds=took)
    return replace(found, notes=(*subject.notes, *doubts), plan=_with_reasons(found, doubts))


def _guess(model: nn.Module, inputs: object, tokenizer: Tokenizer | None) -> tuple[Task, str, object]:
    """The task, the reason, and the sample (an iterator can be read only once)."""
    if not hasattr(inputs, "__len__") and hasattr(inputs, "__iter__"):
        inputs = list(inputs)
    try:
        decoder = read_decoder(model)
    except UsageError:
        return "predict", "guessed, as it is not a causal language model that Flatout generates with", inputs

    def are_prompts(some: object) -> bool:
        try:
            read_prompts(some, tokenizer=tokenizer, vocabulary=decoder.vocabulary, max_tokens=decoder.max_tokens)
        except UsageError:
            return False
        return True

    # One bad prompt among good ones is for generation to name.
    one_by_one: Iterable[object] = ()
    if isinstance(inputs, Iterable) and not isinstance(inputs, str | Mapping) and getattr(inputs, "ndim", 1) != 0:
        one_by_one = inputs
    if are_prompts(inputs) or any(are_prompts([one]) for one in one_by_one):
        return "generate", f'guessed from {decoder.family} and prompts (task="predict" for its outputs)', inputs
    return "predict", "guessed, as the sample holds no prompts", inputs


def _check(model: nn.Module, task: Task | None, plan: Plan | None, exactness: Exactness, seconds: float) -> None:
    as_model(model)
    as_plan(plan)
    if task not in (None, *get_args(Task)):
        raise UsageError(f"task is {task!r}", limit="it is 'predict', 'generate' or None")
    as_exactness(exactness)
    as_seconds(seconds)


def _doubts(search: InferenceSearch, load: LoadWatch) -> list[str]:
    found = []
    answers = search.plain.accuracy.answers
    if 0 < answers < FEW_ANSWERS:
        found.append(f"agreement was judged by {answers} answers: at least {FEW_ANSWERS} show a share of 1 %")
    seen = load.read()
    if seen is not None and seen.contended:
        found.append(
            f"others kept {seen.others_cores:.1f} of {seen.logical_cores} cores busy: this holds for such a machine; "
            "tune again when it is idle"
        )
    return found


def _tuning(
    search: InferenceSearch, task: tuple[Task, str], machine: Machine, *, budget_seconds: float, seconds: float
) -> InferenceTuning:
    subject, final = search.subject, search.final
    count = subject.count
    plain = final.baseline_seconds / count if final else search.plain.usual_seconds / count
    return InferenceTuning(
        plan=search.current.plan,
        task=task[0],
        task_reason=task[1],
        model=type(subject.model).__name__,
        unit=subject.unit,
        sample=subject.sample,
        state=search.state,
        budget_seconds=budget_seconds,
        tolerance=search.limits.tolerance,
        items=search.limits.items,
        plain_seconds=plain,
        chosen_seconds=final.candidate_seconds / count if final else plain,
        comparison=None if final is None else final.comparison,
        plain_accuracy=search.plain.accuracy,
        accuracy=search.current.accuracy,
        share=search.current.runner.share(),
        machine_fingerprint=machine.fingerprint,
        machine_name=machine.cpu.name,
        torch_version=machine.versions.torch,
        seconds=seconds,
    )


def _with_reasons(tuning: InferenceTuning, doubts: list[str]) -> Plan:
    """The plan with why each choice was made, and where."""
    reasons = dict(tuning.plan.reasons)
    for trial in tuning.kept:
        gain = f"x{trial.comparison.ratio:.2f} here" if trial.comparison is not None else "faster here"
        cost = "" if trial.reason == "faster" else f"; {trial.reason}"
        near = "" if trial.accuracy is None else f"; {trial.accuracy}"
        for name in trial.choices:
            reasons[name] = f"{gain}; {trial.exactness}{near}{cost}"
    return replace(
        tuning.plan,
        reasons={name: why for name, why in reasons.items() if getattr(tuning.plan, name) is not None},
        machine_fingerprint=tuning.machine_fingerprint,
        machine_name=tuning.machine_name,
        torch_version=tuning.torch_version,
        exactness=worst(trial.exactness for trial in tuning.kept) if tuning.kept else None,
        speedup=None if tuning.comparison is None else tuning.comparison.ratio,
        warnings=tuple(doubts),
    )
