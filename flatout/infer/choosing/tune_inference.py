"""Choose how to run a model: each inference lever is measured on the user's own sample and kept close to fp32.

    found = flatout.tune_inference(model, sample_inputs, items=100_000)
    print(found.summary())
    for output in flatout.predict(model, inputs, found.plan): ...

A choice that is slower, not significantly faster, too far from fp32, or does not pay off within the items to be served
is left out, with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import get_args

from torch import nn
from torch.types import Device

from flatout.arguments import as_exactness, as_model, as_plan, as_seconds, as_whole_number
from flatout.errors import UsageError
from flatout.infer.choosing.closeness import Tolerance
from flatout.infer.choosing.search import InferenceSearch, Limits
from flatout.infer.choosing.tuned_generation import TunedGeneration
from flatout.infer.choosing.tuned_prediction import TunedPrediction
from flatout.infer.choosing.tuning import InferenceTuning, Task
from flatout.infer.generation.families import read_decoder
from flatout.infer.generation.prompts import read_prompts
from flatout.infer.left_unchanged import left_unchanged
from flatout.infer.tokenizer_source import Tokenizer
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.plan import Plan
from flatout.plan_choices import Exactness, worst
from flatout.search.search import stopped_by_interrupt
from flatout.timing import LoadWatch

FEW_ANSWERS = 100
_Tuned = TunedGeneration | TunedPrediction


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
    began, why = time.perf_counter(), "as asked"
    _check(model, task, plan, exactness, seconds)
    items = None if items is None else as_whole_number(items, "items")
    tolerance = Tolerance(max_error=max_error, min_agreement=min_agreement, max_divergence=max_divergence)
    if task is None:
        task, why, sample_inputs = _guess(model, sample_inputs, tokenizer)
    base = as_plan(plan, task)
    say, machine, load = progress or (lambda text: None), detect(), LoadWatch()
    with left_unchanged(model):
        say("running the model as it is, and in fp32")
        if task == "generate":
            subject: _Tuned = TunedGeneration(
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
        left = seconds - (time.perf_counter() - began)
        limits = Limits(seconds=left, exactness=exactness, tolerance=tolerance, items=items)
        search = InferenceSearch(subject, base, subject.options(machine), limits, say)
        with stopped_by_interrupt(search.stop, say):
            search.run()
    doubts, took = _doubts(search, load), time.perf_counter() - began
    found = _tuning(search, subject, model, (task, why), machine, budget_seconds=seconds, seconds=took)
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
            "tune again when it is quiet"
        )
    return found


def _tuning(
    search: InferenceSearch,
    subject: _Tuned,
    model: nn.Module,
    task: tuple[Task, str],
    machine: Machine,
    *,
    budget_seconds: float,
    seconds: float,
) -> InferenceTuning:
    count = subject.count
    final = search.final
    plain = final.baseline_seconds / count if final else search.plain.usual_seconds / count
    accuracy = search.current.accuracy
    return InferenceTuning(
        plan=search.current.plan,
        task=task[0],
        task_reason=task[1],
        model=type(model).__name__,
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
        accuracy=accuracy,
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
