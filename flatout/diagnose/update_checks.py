"""From the loss to the weights: are gradients cleared, clipped, scaled and used in the right order?"""

from __future__ import annotations

from flatout.diagnose.check import Seen, check, where
from flatout.diagnose.facts import Facts
from flatout.script.behaviour_seen import SourceLine
from flatout.units import format_seconds

LEAST_STEPS = 3
NEARLY_ALL = 0.9
LEAST_BACKWARDS = 1.8
"""A step, for accumulation: the last one of an epoch may have fewer micro-batches."""
ZERO_SHARE = 0.01
OPTIMIZERS = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "LBFGS", "ASGD", "Rprop",
    "Adafactor", "SparseAdam", "Muon",
)  # fmt: skip


@check(
    means="Gradients are clipped while they are still multiplied by the gradient scaler.",
    needs="in at least 3 steps the clip came after backward and before `scaler.unscale_`",
    if_wrong="one extra call",
)
def clip_before_unscale(facts: Facts) -> Seen | None:
    for clip in facts.seen.clips:
        if clip.before_unscale >= LEAST_STEPS and clip.before_unscale >= NEARLY_ALL * clip.steps:
            return Seen(
                title="gradients are clipped before they are unscaled",
                evidence=f"in {clip.before_unscale} of {clip.steps} steps: the limit is compared with gradients that "
                "are multiplied by the scale, so that nearly every step is clipped",
                remedy="scaler.unscale_(optimizer) before the clip",
                fault=True,
                lines=where(clip.line),
                unknown="it changes what is learned, not the time",
            )
    return None


@check(
    means="Gradients are clipped before the backward pass that computes them, so nothing is clipped.",
    needs="in at least 3 steps the clip came before every backward pass of the step, and none came after them",
    if_wrong="one extra clip per step",
)
def clip_before_backward(facts: Facts) -> Seen | None:
    for clip in facts.seen.clips:
        if clip.before_backward >= LEAST_STEPS and clip.before_backward >= NEARLY_ALL * clip.steps:
            return Seen(
                title="gradients are clipped before the backward pass",
                evidence=f"in {clip.before_backward} of {clip.steps} steps: the optimizer gets gradients that "
                "nothing has clipped",
                remedy="clip between backward() and the optimizer's step()",
                fault=True,
                lines=where(clip.line),
                unknown="it changes what is learned, not the time",
            )
    return None


@check(
    means="Gradients of earlier steps are added to those of each step.",
    needs="in at least 3 steps, and in 9 of 10, new gradients arrived at the ones that the optimizer's last step "
    "had used",
    if_wrong="gradients are cleared that were meant to be summed over optimizer steps",
)
def missing_zero_grad(facts: Facts) -> Seen | None:
    seen = facts.seen
    steps = seen.accumulated_steps + seen.zeroed_steps
    if seen.accumulated_steps < LEAST_STEPS or seen.accumulated_steps < NEARLY_ALL * steps:
        return None
    return Seen(
        title="gradients are never cleared" if not seen.zeroed_steps else "gradients are cleared in few steps only",
        evidence=f"in {seen.accumulated_steps} of {steps} steps backward added to the gradients that the step before "
        "had used",
        remedy="optimizer.zero_grad() before each backward pass, or after each step",
        fault=True,
        lines=where(seen.optimizer_lines, [one.line for one in seen.backwards], seen.zero_grad_line),
        unknown="it changes what is learned, not the time",
    )


@check(
    means="The learning rate scheduler steps before the optimizer: the first rate of the schedule is skipped.",
    needs="in at least 3 steps it came between backward and the step of its optimizer, which was given no closure; or "
    "it stands before its optimizer's step in the same loop, or before the loop with them in the loop over epochs, and "
    "was called there; or torch has warned that it came first, and no gradient scaler left that step out",
    if_wrong="the schedule begins one step later",
)
def scheduler_order(facts: Facts) -> Seen | None:
    seen = facts.seen
    before = {
        scheduler[:2]: optimizer for scheduler, optimizer in (facts.source.scheduler_first if facts.source else ())
    }
    for one in seen.schedulers:
        between = one.between >= LEAST_STEPS and one.between >= NEARLY_ALL * one.calls
        optimizer = before.get(one.line[:2])
        if between or (optimizer is not None and one.calls >= LEAST_STEPS):
            turn = "each before the optimizer's step of the same turn of the loop"
            when = f"{one.between} of them between backward and the optimizer's step" if between else turn
            return _scheduler_first(
                f"{one.calls} calls at {one.line[0]}:{one.line[1]}, {when}",
                "optimizer.step() first, then scheduler.step()",
                where(one.line, optimizer),
            )
    early = _first_in_epoch(facts)
    if early is not None:
        return early
    warned = [one for one in seen.schedulers if one.warned]
    if not warned or seen.scaler:
        return None
    return _scheduler_first(
        "torch has warned that the scheduler was called before the optimizer's first step",
        "call scheduler.step() at the end of an epoch or step, not at its beginning",
        where([one.line for one in warned]),
    )


def _scheduler_first(evidence: str, remedy: str, lines: tuple[SourceLine, ...]) -> Seen:
    return Seen(
        title="the scheduler steps before the optimizer",
        evidence=evidence,
        remedy=remedy,
        fault=True,
        lines=lines,
        unknown="it changes what is learned, not the time",
    )


def _first_in_epoch(facts: Facts) -> Seen | None:
    """Torch warns of it too, unless the script has turned warnings off."""
    called = {one.line[:2] for one in facts.seen.schedulers}
    for early, steps in facts.source.scheduler_first_in_epoch if facts.source is not None else ():
        if early[:2] in called:
            return _scheduler_first(
                f"{early[0]}:{early[1]} is called at the beginning of each epoch, also of the first one",
                "call scheduler.step() at the end of an epoch, not at its beginning",
                where(early, steps),
            )
    return None


@check(
    means="A learning rate scheduler never steps: the rate stays what it is at the beginning.",
    needs="the scheduler's optimizer stepped in the window, the scheduler has not stepped since it was made, and no "
    "file of the script steps it, gives it to anything, or keeps it in an object whose class is a library's in part",
    if_wrong="the learning rate changes as the schedule says",
)
def scheduler_never_steps(facts: Facts) -> Seen | None:
    lines = facts.source.unused_schedulers if facts.source is not None else ()
    for one in facts.seen.idle_schedulers:
        made = [line for line in lines if line[:2] in {found[:2] for found in facts.lines_calling(one.kind)}]
        if made and one.steps >= LEAST_STEPS:
            return Seen(
                title=f"{one.kind} is made and never steps",
                evidence=f"the optimizer has stepped {one.steps} times while the script was watched, the scheduler "
                "not once, and no line of the script calls its step() or passes it on",
                remedy="scheduler.step() after each epoch, or after each step of the optimizer where the schedule "
                "counts steps; or leave the scheduler out",
                fault=True,
                lines=where(made, facts.seen.optimizer_lines),
                unknown="it changes what is learned, not the time",
            )
    return None


@check(
    means="An optimizer is made anew in each step, so that its momentum and averages of gradients begin at zero each "
    "time.",
    needs="in at least 3 steps, and in 9 of 10, the optimizer was made since the step before, has the same parameters, "
    "keeps state from step to step, and was given no closure",
    if_wrong="steps use momentum and averages of earlier steps",
)
def optimizer_made_in_each_step(facts: Facts) -> Seen | None:
    for one in facts.seen.remade_optimizers:
        if one.remade >= LEAST_STEPS and one.remade >= NEARLY_ALL * (one.steps - 1):
            return Seen(
                title=f"{one.kind} is made anew in each step",
                evidence=f"{one.remade} of {one.steps} steps were made by an optimizer that had not stepped before: "
                "what it keeps of earlier gradients (momentum, averages of squares) is lost each time",
                remedy="make the optimizer once, before the loop",
                fault=True,
                lines=where(facts.lines_calling(one.kind), one.line),
                unknown="it changes what is learned, not the time",
            )
    return None


@check(
    means="Gradients of several micro-batches are summed where their mean was intended: the update is that many "
    "times too large.",
    needs="two or more backward passes a step from one line, which is reached from one place alone, each from a loss "
    "that is a mean and is not divided; the source divides neither a loss nor a gradient, nor the learning rate by "
    "their number, and gives backward no gradient; and it steps the optimizer only in some turns of the loop, by a "
    "counter, or repeats the backward pass in a loop that only counts",
    if_wrong="the learning rate has to be multiplied by the number of micro-batches",
)
def accumulation_not_averaged(facts: Facts) -> Seen | None:
    seen, source = facts.seen, facts.source
    if source is None or len(seen.backwards) != 1 or source.loss_divided:
        return None
    one = seen.backwards[0]
    if one.per_step < LEAST_BACKWARDS or one.callers > 1 or one.scaled or one.reduction != "mean":
        return None
    steps = [call for call in source.calling("step") if "opt" in call.owner.lower() or "scaler" in call.owner.lower()]
    accumulates = any(call.guarded for call in steps) or source.mentions("accum")
    if not accumulates and not any(call.repeats for call in source.calling("backward")):
        return None
    return Seen(
        title=f"gradients of {one.per_step:.2g} micro-batches are summed, not averaged",
        evidence=f"{one.calls} backward passes in {seen.steps} steps, each from a mean that is not divided",
        remedy=f"(loss / {round(one.per_step)}).backward()",
        fault=True,
        certain=False,
        lines=where(one.line),
        unknown="it changes what is learned, not the time",
    )


@check(
    means="Parameters get gradients, but no optimizer has them.",
    needs="a loss reaches them; at the end of the window they require gradients, have one, have not changed, and are "
    "in none of the optimizers that exist; others that the losses reach are",
    if_wrong="parameters that were to stay as they are get trained: say requires_grad_(False) for those",
)
def parameters_not_in_optimizer(facts: Facts) -> Seen | None:
    seen, found = facts.seen, facts.seen.outside_optimizer
    if found is None or seen.steps < LEAST_STEPS:
        return None
    return Seen(
        title=f"{found.count:,} numbers{f' of {found.module}' if found.module else ''} get gradients, but no optimizer "
        "updates them",
        evidence=f"{', '.join(found.names)}: they require gradients, have them, and have not changed in {seen.steps} "
        "steps; other parameters have",
        remedy="pass them to the optimizer; or, if they are to stay, requires_grad_(False) saves their gradients",
        fault=True,
        certain=False,
        lines=where(facts.lines_calling(*OPTIMIZERS), seen.optimizer_lines),
        unknown="it changes what is learned, and no step was timed without these gradients",
    )


@check(
    means="zero_grad fills gradients with zeros, to which backward then adds.",
    needs="zero_grad was called with set_to_none=False, and filling takes at least 1 % of a step",
    if_wrong="code that reads .grad between zero_grad and backward gets None",
)
def zero_grad_fills(facts: Facts) -> Seen | None:
    seen = facts.seen
    if not seen.zero_grad_fills or seen.zero_grad_seconds is None:
        return None
    share = facts.share(seen.zero_grad_seconds)
    if share is None or share < ZERO_SHARE:
        return None
    return Seen(
        title="zero_grad fills gradients with zeros",
        evidence=f"filling takes {format_seconds(seen.zero_grad_seconds)} a step, {share:.1%}; adding to zeros "
        "instead of writing comes on top",
        remedy="optimizer.zero_grad(), whose default frees the gradients",
        cost_seconds=seen.zero_grad_seconds,
        lines=where(seen.zero_grad_line),
        command=facts.tune,
        plan={"zero_grad": "none"},
    )


@check(
    means="backward keeps a graph that nothing uses again.",
    needs="at least 3 passes with retain_graph=True, none of whose graphs shares a node with a later pass",
    if_wrong="a second backward pass through the same graph raises an error at once",
)
def needless_retain_graph(facts: Facts) -> Seen | None:
    for one in facts.seen.backwards:
        if one.retained >= LEAST_STEPS and not one.retained_needed:
            return Seen(
                title="retain_graph=True is not needed",
                evidence=f"{one.retained} backward passes kept their graph, and no later pass used it",
                remedy="leave it out: the memory of the graph is free as soon as backward has used it",
                lines=where(one.line),
                unknown="the memory that is kept was not measured",
            )
    return None
