"""Modes: training or evaluation, gradients or none, debugging left on."""

from __future__ import annotations

from flatout.diagnose.check import Seen, check, source_line, where
from flatout.diagnose.facts import Facts
from flatout.profiling.profile import OperatorRow
from flatout.script.behaviour_seen import ForwardSeen

LEAST_CALLS = 3
RARELY = 10
"""Training calls for one that only evaluates; labels for the next training call are made more often."""
ALTERNATING = 0.5
"""Of the training calls, or of the steps where these have several, those with a run of calls before them: a policy acts
so between its updates."""
FINITE = ("aten::isnan", "aten::isinf", "aten::isfinite")
LEAST_FINITE, FINITE_SHARE, FINITE_CALLS = 10, 0.05, 0.1
MOST_IN_CHECK = 15
"""Operators of a line for each check that it makes, which take apart, compare, reduce and read. A line with more does
other work: it calls a library that checks what it computes."""
RANDOM = (
    *(f"torch.{name}" for name in ("randn", "rand", "randint", "randperm", "normal", "bernoulli")),
    *("random_split", "DataLoader", "Linear", "Conv1d", "Conv2d", "Embedding", "LSTM", "GRU", "Transformer"),
)
"""Calls that draw from torch's generator, layers for their weights; numpy and random have some names in common."""
UNTIMED = "it was not timed without"


def _trains(facts: Facts, model: ForwardSeen) -> list[ForwardSeen]:
    """Calls of it whose graph a backward pass used."""
    same = [one for one in facts.seen.forwards if (one.module, one.model) == (model.module, model.model)]
    return [one for one in same if one.used and one.updated]


@check(
    means="Evaluation builds graphs for a backward pass that never comes.",
    needs="at least 3 calls of a model that trains, one after the other at one line, whose graphs were dropped "
    "unused, while calls at another line, or in the other mode, train it",
    if_wrong="a backward pass through a forward under no_grad raises an error at once",
)
def evaluation_with_grad(facts: Facts) -> Seen | None:
    for one in facts.seen.forwards:
        if not one.grad or one.used or one.unused < LEAST_CALLS or one.longest_run < LEAST_CALLS or not one.updated:
            continue
        if not any(other.line[:2] != one.line[:2] or other.training != one.training for other in _trains(facts, one)):
            continue
        return Seen(
            title=f"{one.module} is evaluated with gradients on",
            evidence=f"{one.unused} calls, up to {one.longest_run} in a row, built graphs that no backward pass used",
            remedy="with torch.no_grad(): (or inference_mode) around evaluation",
            fault=True,
            lines=where(one.line),
            unknown=UNTIMED,
        )
    return None


@check(
    means="Evaluation runs in training mode: dropout is active, and batch norm uses batch statistics "
    "and updates the running ones.",
    needs="at least 3 calls that no backward pass used, in a row or without gradients once in ten training calls or "
    "more rarely (not of a generator, which learns through another model: such calls draw samples), of a model in "
    "training mode with such layers, which is trained elsewhere; likely where they come with every second update or "
    "more often, as those of a policy that acts; silent where most calls are on the same tensor as the one before and "
    "dropout is the only such layer (Monte Carlo dropout); or at least 3 calls in evaluation mode in which functional "
    "dropout is called without `training`",
    if_wrong="Monte Carlo dropout, or statistics that were to be recomputed, need training mode",
)
def evaluation_in_train_mode(facts: Facts) -> Seen | None:
    for one in facts.seen.forwards:
        if one.dropout_line is not None and not one.used and one.calls >= LEAST_CALLS and _trains(facts, one):
            return Seen(
                title=f"dropout is active where {one.module} is evaluated",
                evidence=f"{one.calls} calls in evaluation mode at {one.line[0]}:{one.line[1]}; "
                "torch.nn.functional.dropout drops values unless it is told not to",
                remedy="F.dropout(x, p, training=self.training), or an nn.Dropout, which follows model.eval()",
                fault=True,
                lines=where(one.dropout_line, one.line),
                unknown="it changes results, not the time",
            )
        if not one.training or not one.mode_layers or one.used or one.calls < LEAST_CALLS or one.recalibrates:
            continue
        if _samples_dropout(one):
            continue
        trained = sum(other.used for other in _trains(facts, one) if other.line[:2] != one.line[:2])
        in_a_row = one.longest_run >= LEAST_CALLS
        rarely = not one.grad and not one.learns_through_another and RARELY * one.calls <= trained
        if not one.updated or not trained or not (in_a_row or rarely):
            continue
        often = f"up to {one.longest_run} in a row" if in_a_row else f"one in {trained // one.calls} training calls"
        return Seen(
            title=f"{one.module} is evaluated in training mode",
            evidence=f"{one.calls} calls without a backward pass, {often}, with "
            f"{', '.join(one.mode_layers)} in training mode",
            remedy="model.eval() before evaluation, model.train() after it",
            fault=True,
            certain=in_a_row and one.calls < ALTERNATING * min(trained, facts.seen.steps) * one.longest_run,
            lines=where(one.line),
            unknown="it changes results, not the time",
        )
    return None


def _samples_dropout(one: ForwardSeen) -> bool:
    """Monte Carlo dropout: the same inputs again and again, which give another result only because dropout is on."""
    return 2 * one.repeated >= one.calls and all("dropout" in layer.lower() for layer in one.mode_layers)


@check(
    means="Training runs in evaluation mode: dropout is off, and batch normalisation does not learn.",
    needs="at least 3 calls of a model in evaluation mode, with such layers, whose graphs were used to update it; "
    "no other line trains it in training mode",
    if_wrong="statistics that were frozen on purpose change",
)
def training_in_eval_mode(facts: Facts) -> Seen | None:
    for one in facts.seen.forwards:
        if one.training or not one.grad or one.used < LEAST_CALLS or not one.mode_layers or not one.updated:
            continue
        if any(other.training and other.line[:2] != one.line[:2] for other in _trains(facts, one)):
            continue  # such as adversarial examples, made in evaluation mode
        before = any(other.training for other in _trains(facts, one))
        return Seen(
            title=f"{one.module} trains in evaluation mode",
            evidence=f"{one.used} calls that were trained on ran with {', '.join(one.mode_layers)} in evaluation mode"
            + (", after others in training mode" if before else ""),
            remedy="model.train() at the start of each epoch, as model.eval() stays in force",
            fault=True,
            certain=before,
            lines=where(one.line, facts.lines_calling("eval")),
            unknown="it changes what is learned, not the time",
        )
    return None


@check(
    means="Layers with weights are made inside forward: they are new and untrained in every call.",
    needs="modules with parameters were made inside a forward pass in at least 3 steps",
    if_wrong="a layer is moved to __init__",
)
def modules_made_in_forward(facts: Facts) -> Seen | None:
    seen = facts.seen
    made = [one for one in seen.made_in_forward if one.steps >= LEAST_CALLS]
    if not made:
        return None
    times = [one for one in seen.times if one.line[:2] in {other.line[:2] for other in made}]
    seconds = sum(one.seconds for one in times)
    return Seen(
        title=f"{made[0].kind} is created in every forward pass",
        evidence="; ".join(f"{one.line[0]}:{one.line[1]}: {one.made} in {one.steps} steps" for one in made[:3])
        + "; no optimizer has their weights",
        remedy="make it in __init__",
        fault=True,
        cost_seconds=seconds or None,
        lines=where([one.line for one in made]),
        unknown="" if seconds else "samples of the stack did not meet the line",
    )


@check(
    means="Autograd's anomaly detection is on: every operation records a traceback, every gradient is checked.",
    needs="it was on during a backward pass",
    if_wrong="the next NaN is reported without the line that made it",
)
def anomaly_mode(facts: Facts) -> Seen | None:
    if not facts.seen.anomaly:
        return None
    return Seen(
        title="anomaly detection is on",
        evidence="torch.is_anomaly_enabled() during backward passes",
        remedy="leave it out once the NaN is found",
        fault=True,
        lines=where(facts.lines_calling("set_detect_anomaly", "detect_anomaly")),
        unknown=UNTIMED,
    )


@check(
    means="A setting for debugging is on that makes each step slower, or values are checked for NaN all over a model.",
    needs="the setting was in force in the steps that were watched; or lines that call isnan, isinf or isfinite 10 "
    "times a step or more take 5 % of it, or a tenth of its operators (of a line that does other work too, as where it "
    "calls a library, the checks alone count)",
    if_wrong="the bug it was meant to catch goes unnoticed",
)
def debug_mode(facts: Facts) -> Seen | None:
    if facts.behaviour is None:
        return None
    settings = list(facts.behaviour.debug)
    checked = facts.lines_calling("gradcheck", "gradgradcheck", in_training_loop=True)
    if checked:
        settings.append("gradients are checked numerically in the training loop")
    if not settings:
        return _finite_checks(facts)
    lines = facts.lines_calling("profile", "emit_nvtx", "set_sync_debug_mode", "settrace", "setprofile", "setdefault")
    return Seen(
        title="a debugging setting is on",
        evidence="; ".join(settings),
        remedy="switch it off for runs that should be fast",
        fault=True,
        lines=where(checked, lines),
        unknown=UNTIMED,
    )


def _finite_checks(facts: Facts) -> Seen | None:
    """By what the lines that make them call, such as `assert torch.isfinite(x).all()` in a hook of every module; where
    a line does other work too, by the checks alone."""
    profile = facts.profile
    if profile is None or not profile.operator_calls or facts.seen.anomaly:  # that mode makes such checks too
        return None
    checks = [row for row in profile.operators if row.name in FINITE and row.line]
    lines, calls = {row.line for row in checks}, sum(row.calls for row in checks)
    there = [row for line in lines for row in _of_checks([row for row in profile.operators if row.line == line])]
    cost, share = sum(row.seconds for row in there), facts.share(sum(row.seconds for row in there)) or 0.0
    many = sum(row.calls for row in there) >= FINITE_CALLS * profile.operator_calls
    if calls < LEAST_FINITE or not (many or share >= FINITE_SHARE):
        return None
    return Seen(
        title=f"{calls:.0f} checks for NaN or infinity in each step",
        evidence=f"{calls:.0f} calls of isnan, isinf or isfinite a step",
        remedy="check the loss alone, or once in a while: flatout.Plan(nonfinite='raise') checks the gradient's norm",
        certain=False,
        cost_seconds=cost,
        lines=where([known for line in sorted(lines) if (known := source_line(line)) is not None]),
    )


def _of_checks(rows: list[OperatorRow]) -> list[OperatorRow]:
    """Of the operators of a line that checks for NaN or infinity: those that belong to that."""
    checks = [row for row in rows if row.name in FINITE]
    alone = sum(row.calls for row in rows) <= MOST_IN_CHECK * sum(row.calls for row in checks)
    return rows if alone else checks


@check(
    means="Nothing seeds the random generators, so no two runs are alike.",
    needs="torch's generator has a seed that nobody chose, and no name in the script contains 'seed'",
    if_wrong="one extra line",
    always_note=True,
)
def no_seed(facts: Facts) -> Seen | None:
    source = facts.source
    if source is None or facts.seen.seeded is not False or source.mentions("seed") or not source.calls:
        return None
    return Seen(
        title="no seed is set",
        evidence="torch's generator has a random seed, and the script sets none",
        remedy="torch.manual_seed(0) at the start, to compare runs; flatout run --check-deterministic finds what "
        "else differs",
        lines=where(facts.lines_calling(*RANDOM)[:1]),
        unknown="it costs repeatability, not time",
    )
