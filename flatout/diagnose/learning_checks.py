"""Does the model learn: losses, and the sizes of gradients by layer?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flatout.diagnose.check import Seen, check, source_line, where
from flatout.diagnose.facts import Facts
from flatout.profiling.profile import sizes_in
from flatout.script.behaviour_seen import Behaviour, BroadcastSeen, GradientsSeen, LayerGradients

LEAST_SAME, LEAST_NONFINITE, LEAST_GRAPHS = 8, 3, 3
LEAST_LOSSES = 120
"""Fewer say nothing of a trend against the noise of batches."""
LEAST_STEPS = 5
VANISHED, LEAST_LAYERS = 1e-6, 4
MOST_TARGETS, TARGETS_SHARE = 4, 0.5
"""Calls in a row, and of the steps those with a call, of a network that makes targets."""
REWARDED = ("reward", "advantage")
"""Names in a script whose loss is weighted with what a policy has earned."""
FIRST_LAYERS = 3
"""So many from the input on, and no others, show a fall too, in whatever order their sizes are."""
DIFFERENCES = ("aten::sub", "aten::rsub")
EXPLODED = 1e4
ELASTIC = 1e4
"""Relative change of the loss for a relative change of all weights: a few tens in deep nets that train."""
CHANGES_LEARNING = "it changes what is learned, not the time"


@check(
    means="The loss does not fall, because nothing is learned, or something other than intended is learned.",
    needs="in the steps that were watched: every gradient was exactly 0; or no weight changed at all, or the loss was "
    "exactly the same in 8 steps in a row (neither of these two where steps are given a closure and the optimizer "
    "stops by itself once it has converged, as LBFGS); or it was NaN or infinite in 3; or 120 losses or more rise, by "
    "a rank test at 1 in 1,000, to twice their level, they are not sums over batches of several sizes, the line of the "
    "backward pass is reached from one place alone, no network is called for targets in every second step or more, and "
    "nothing in the source is named a reward or an advantage; or predictions and targets are broadcast against each "
    "other to more elements than either has, such as [80, 1] and [80], in a loss of torch's or in a difference from "
    "which operations by element alone lead to the loss",
    if_wrong="a run is stopped that would have learned later",
)
def loss_not_falling(facts: Facts) -> Seen | None:
    seen = facts.seen
    if seen.broadcast_losses:
        return _broadcast(facts, seen.broadcast_losses)
    may_rise = (
        _has_moving_targets(seen) or _is_rewarded(facts) or _has_several_losses(seen) or _is_sum_of_any_size(seen)
    )
    why = _why_not_falling(
        seen.losses, moves=seen.weights_move, may_rise=may_rise, may_stop=seen.stops_where_converged
    ) or _dead(seen.gradients, seen.losses)
    if not why:
        return None
    return Seen(
        title="the loss does not fall",
        evidence=why,
        remedy="check the learning rate, and that the optimizer has the parameters of the model that computes the loss",
        fault=True,
        certain=False,
        lines=where([one.line for one in seen.backwards], seen.optimizer_lines),
        unknown=CHANGES_LEARNING,
    )


@check(
    means="A softmax comes before the cross-entropy, which applies softmax itself: gradients are weak, and the loss "
    "cannot approach 0.",
    needs="in at least 3 backward passes of a line, and all whose graphs were followed, a log_softmax takes what a "
    "softmax gives; a log_softmax before it changes nothing and is not a finding",
    if_wrong="the model learns faster, and what reads its outputs as probabilities needs the softmax there",
)
def softmax_before_cross_entropy(facts: Facts) -> Seen | None:
    for one in facts.seen.backwards:
        if one.softmax_twice < LEAST_GRAPHS or one.softmax_twice < one.graphs:
            continue
        softmaxes = facts.lines_calling("softmax", "Softmax")
        return Seen(
            title="the loss takes the softmax of a softmax",
            evidence=f"in {one.softmax_twice} of {one.graphs} backward passes, log_softmax, as in cross_entropy, takes "
            "what softmax gives",
            remedy="give cross_entropy the scores, and take the softmax only where probabilities are needed",
            fault=True,
            lines=where(
                softmaxes if len(softmaxes) <= 2 else (),
                facts.lines_calling("cross_entropy", "CrossEntropyLoss", "log_softmax"),
                one.line,
            ),
            unknown=CHANGES_LEARNING,
        )
    return None


def _broadcast(facts: Facts, losses: Sequence[BroadcastSeen]) -> Seen:
    first = losses[0]
    shapes = [sizes_in(f"{one.predictions} {one.targets}") for one in losses]
    made = [  # by hand: of such a loss only the backward pass has a line
        source_line(one.line)
        for one in facts.operators
        if one.name in DIFFERENCES and (sizes := sizes_in(one.shapes)) and (sizes in shapes or sizes[::-1] in shapes)
    ]
    return Seen(
        title="the loss compares every prediction with every target",
        evidence=f"predictions of shape {first.predictions} and targets of shape {first.targets} are broadcast against "
        f"each other, in {sum(one.calls for one in losses)} calls: the model learns the mean of the targets",
        remedy="give both the same shape: targets.unsqueeze(1), or predictions.squeeze(1)",
        fault=True,
        lines=where([one for one in made if one is not None], [one.line for one in losses]),
        unknown=CHANGES_LEARNING,
    )


def _dead(gradients: Sequence[GradientsSeen], losses: Sequence[float | None]) -> str:
    if not any(losses):
        return ""  # 0, or not known
    for one in gradients:
        if len(one.norms) >= LEAST_SAME and not one.nonfinite_steps and not any((*one.norms, *one.largest_vectors)):
            return (
                f"every gradient of {one.module} was exactly 0 in all {len(one.norms)} steps, as after a softmax over "
                "one column, or where no unit is active"
            )
    return ""


def _has_moving_targets(seen: Behaviour) -> bool:
    """Is a network called in the training loop whose output no backward pass uses, as for the targets of Q-learning?

    Such losses may rise while the network learns. Calls of an evaluation come many in a row."""
    return any(
        one.longest_run <= MOST_TARGETS
        and one.weights
        and not one.recalibrates
        and (one.unused if one.grad else one.calls) >= TARGETS_SHARE * seen.steps
        for one in seen.forwards
    )


def _has_several_losses(seen: Behaviour) -> bool:
    """Does one line, as in a function that both networks of a GAN are updated by, start from the losses of several?"""
    return any(one.callers > 1 for one in seen.backwards)


def _is_sum_of_any_size(seen: Behaviour) -> bool:
    """Such losses grow with their batches. Two sizes are those of an epoch, whose last batch is smaller."""
    return seen.batch_shapes > 2 and any(one.reduction == "sum" for one in seen.backwards)


def _is_rewarded(facts: Facts) -> bool:
    """Does the script train a policy? The loss of a policy gradient has a gradient to follow, but no level to reach: it
    rises with the rewards."""
    return facts.source is not None and any(map(facts.source.mentions, REWARDED))


def _why_not_falling(
    losses: Sequence[float | None], *, moves: bool | None, may_rise: bool, may_stop: bool = False
) -> str:
    """may_stop: an optimizer that has converged leaves the weights, and so the loss, exactly as they are."""
    finite = [loss for loss in losses if loss is not None]
    wrong = len(losses) - len(finite)
    if wrong >= LEAST_NONFINITE and losses[-1] is None:
        return f"{wrong} of {len(losses)} losses are NaN or infinite, the last one too"
    if moves is False and not may_stop:
        return (
            f"no weight changed in {len(losses)} steps: the learning rate is 0, updates are below the rounding, or the "
            "loss has no graph that leads to a weight, as after .detach() or torch.tensor(loss)"
        )
    if len(losses) >= LEAST_SAME and len(set(losses)) == 1 and losses[0] != 0.0 and not may_stop:
        return f"the loss was exactly {losses[0]:.6g} in all {len(losses)} steps"
    if len(finite) >= LEAST_LOSSES and not may_rise:
        third = len(finite) // 3
        first, last = statistics.median(finite[:third]), statistics.median(finite[-third:])
        if trend(finite) > 3.3 and first > 0 and last > 2 * first:
            return f"the median of the loss rose from {first:.4g} to {last:.4g} in {len(finite)} steps"
    return ""


def trend(values: Sequence[float]) -> float:
    """Mann and Kendall's statistic: above 3.3, so clear a rise is in noise once in 1,000; below, so clear a fall."""
    if len(values) > 300:
        size = -(-len(values) // 300)
        values = [statistics.median(values[at : at + size]) for at in range(0, len(values), size)]
    count = len(values)
    score = sum((b > a) - (b < a) for index, a in enumerate(values) for b in values[index + 1 :])
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return score / spread if spread else 0.0


@check(
    means="Gradients of the first layers are so small that they learn nothing.",
    needs="in at least 5 steps and every one of them, the mean gradient of a weight is below a millionth of the "
    "largest layer's, is not exactly 0, and sizes fall towards the input; or those of all weights are below a "
    "millionth of a bias's, as the signal dies on its way forward",
    if_wrong="normalisation or another activation changes a network that trained",
)
def vanishing_gradients(facts: Facts) -> Seen | None:
    for one in facts.seen.gradients:
        found = _vanished(one)
        if found:
            first, largest = found[0], max(map(_middle, one.layers))
            other = f"the largest layer: {largest:.2g}"
            if found == list(one.layers):
                other = f"the largest layer: {largest:.2g}, a bias: {statistics.median(one.largest_vectors):.2g}"
            return Seen(
                title=f"gradients vanish in {len(found)} layer{'s' if len(found) > 1 else ''} of {one.module}",
                evidence=f"{first.name}: {_middle(first):.2g} (root mean square), {other}, medians of {len(first.rms)} "
                "steps",
                remedy="residual connections, normalisation, ReLU-like activations, or another initialisation",
                fault=True,
                certain=False,
                lines=where(
                    facts.lines_calling("sigmoid", "Sigmoid", "tanh", "Tanh")
                    or [back.line for back in facts.seen.backwards]
                ),
                unknown=CHANGES_LEARNING,
            )
    return None


def _vanished(seen: GradientsSeen) -> list[LayerGradients]:
    layers = [one for one in seen.layers if len(one.rms) >= LEAST_STEPS and any(one.rms)]
    if len(layers) < LEAST_LAYERS:
        return []
    largest = [max(one.rms[step] for one in layers) for step in range(len(layers[0].rms))]
    pairs = list(zip(largest, seen.largest_vectors, strict=False))
    if pairs and len(layers) == len(seen.layers) and all(0 < weight < VANISHED * bias for weight, bias in pairs):
        return layers
    gone = [
        one
        for one in layers
        if all(0 < rms < VANISHED * most for rms, most in zip(one.rms, largest, strict=True) if most)
    ]
    sizes = [math.log10(max(_middle(one), 1e-300)) for one in layers]
    falls_to_input = trend(sizes) > 1.6 or (len(gone) >= FIRST_LAYERS and gone == layers[: len(gone)])
    return gone if gone and falls_to_input and layers.index(gone[0]) < len(layers) / 2 else []


@check(
    means="Gradients are so large that steps destroy what was learned.",
    needs="gradients are NaN or infinite in at least 3 steps without a gradient scaler; or their norm rises a "
    "thousandfold, step after step; or a small relative change of the weights changes the loss ten thousand times "
    "as much, and nothing clips",
    if_wrong="clipping makes steps shorter that were right",
)
def exploding_gradients(facts: Facts) -> Seen | None:
    behaviour = facts.seen
    for one in behaviour.gradients:
        why = _exploded(one, behaviour.losses, scaler=behaviour.scaler, clipped=bool(behaviour.clips))
        if why:
            return Seen(
                title=f"gradients of {one.module} explode",
                evidence=why,
                remedy="a lower learning rate, torch.nn.utils.clip_grad_norm_ before the step, or another "
                "initialisation",
                fault=True,
                certain=False,
                lines=where([back.line for back in behaviour.backwards], behaviour.optimizer_lines),
                unknown=CHANGES_LEARNING,
            )
    return None


def _exploded(seen: GradientsSeen, losses: Sequence[float | None], *, scaler: bool, clipped: bool) -> str:
    if seen.nonfinite_steps >= LEAST_NONFINITE and not scaler:
        return f"gradients were NaN or infinite in {seen.nonfinite_steps} steps, first in {seen.first_nonfinite}"
    norms = [norm for norm in seen.norms if norm > 0]
    if clipped or len(norms) < LEAST_STEPS:
        return ""
    if len(norms) >= 8 and norms[-1] > 1000 * norms[0] and trend(norms) > 2.6:
        return f"the norm of the gradients rose from {norms[0]:.3g} to {norms[-1]:.3g} in {len(norms)} steps"
    sizes = [abs(loss) for loss in losses[: len(norms)] if loss]
    if len(sizes) < LEAST_STEPS or seen.weight_norm == 0:
        return ""
    elasticity = statistics.median(norms) * seen.weight_norm / statistics.median(sizes)
    middles = [_middle(one) for one in seen.layers if any(one.rms)]
    if elasticity > ELASTIC and len(middles) >= LEAST_LAYERS and middles[0] > EXPLODED * min(middles):
        return (
            f"norm of the gradients {statistics.median(norms):.3g}, of the weights {seen.weight_norm:.3g}, loss "
            f"{statistics.median(sizes):.3g}: a change of the weights by 1 in a million changes the loss by "
            f"{elasticity / 1e4:.0f} %"
        )
    return ""


def _middle(one: LayerGradients) -> float:
    return statistics.median(one.rms) if one.rms else 0.0
