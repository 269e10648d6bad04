"""Layers and operators: what torch has a faster form of."""

from __future__ import annotations

import math

from flatout.diagnose.check import Seen, check, source_line, where
from flatout.diagnose.facts import CHANGING_SHAPES, Facts
from flatout.profiling.profile import ModuleRow, OperatorRow, Profile, sizes_in
from flatout.script.behaviour_seen import SourceLine
from flatout.units import format_bytes, format_seconds

CONVOLUTION_SHARE, LEAST_GAIN = 0.4, 0.2
WIDE, WIDE_BYTES, SOFTMAX_SHARE = 8192, 64 << 20, 0.1
LAYER_SHARE = 0.05
ATTENTION_SHARE = 0.1
TORCHS_ATTENTION = "scaled_dot_product"
SCORES = ("softmax", "pointwise", "copy", "reduction")
"""Classes of operators that a fused kernel does not need."""
BYTES_OF_FP32 = 4


@check(
    means="Convolutions run in the default memory format where channels_last is faster here.",
    needs="convolutions take at least 40 % of a step, and the slowest of them, timed alone in both formats, would "
    "save 20 % of it, by the lower end of the confidence interval",
    if_wrong="results differ by rounding; layers that know no such format convert their inputs",
)
def channels_last_missing(facts: Facts) -> Seen | None:
    timed, seen = facts.seen.channels_last, facts.observed
    if timed is None or seen is None or any(one.channels_last for one in seen.modules):
        return None
    rows = [one for one in facts.operators if one.operator_class == "convolution"]
    seconds = sum(one.seconds for one in rows)
    share = facts.share(seconds) or 0.0
    if share < CONVOLUTION_SHARE or timed.low_ratio <= 1:
        return None
    ratio = timed.contiguous_seconds / timed.channels_last_seconds
    saved, surely = seconds * (1 - 1 / ratio), seconds * (1 - 1 / timed.low_ratio)
    if (facts.share(surely) or 0.0) < LEAST_GAIN:
        return None
    return Seen(
        title=f"convolutions are x{ratio:.2f} as fast in channels_last",
        evidence=f"{timed.layers} layers timed alone, forward and backward: "
        f"{format_seconds(timed.contiguous_seconds)} and {format_seconds(timed.channels_last_seconds)}; convolutions "
        f"take {share:.0%} of a step",
        remedy="model.to(memory_format=torch.channels_last), and the same for the inputs",
        certain=False,
        cost_seconds=saved,
        lines=where(_lines_of(rows)),
        command=facts.tune,
        plan={"memory_format": "channels_last"},
    )


@check(
    means="cuDNN searches its algorithms again for each of many input shapes.",
    needs="on a GPU, cudnn.benchmark is on and the inputs of one model had at least 4 shapes at one line in the window",
    if_wrong="the algorithms chosen by rule may be slower than those found by search",
)
def cudnn_benchmark_changing_shapes(facts: Facts) -> Seen | None:
    seen, behaviour = facts.observed, facts.seen
    if seen is None or not facts.on_gpu or not seen.cudnn_benchmark or behaviour.batch_shapes < CHANGING_SHAPES:
        return None
    return Seen(
        title=f"cudnn.benchmark is on, and inputs had {behaviour.batch_shapes} shapes",
        evidence=f"such as {', '.join(behaviour.example_shapes[:3])}, in {behaviour.steps} steps",
        remedy="pad inputs to a few shapes, or leave torch.backends.cudnn.benchmark off",
        fault=True,
        lines=where(facts.source.lines_setting("cudnn.benchmark") if facts.source is not None else ()),
        unknown="it was not timed without",
        command=facts.tune,
    )


@check(
    means="Scores over a large vocabulary are held in memory several times.",
    needs="a log_softmax, as in cross_entropy, over at least 8,192 values whose scores take 64 MiB or more in two "
    "copies, or 10 % of a step; a plain softmax over as many is that of attention",
    if_wrong="the chunked loss saves memory, and rarely time",
)
def huge_softmax(facts: Facts) -> Seen | None:
    rows = [
        one
        for one in facts.operators
        if one.operator_class == "softmax" and "log_softmax" in one.name and _scores(one)[-1] >= WIDE
    ]
    if not rows:
        return None
    seconds = sum(one.seconds for one in rows)
    size_bytes = 2 * BYTES_OF_FP32 * max(math.prod(_scores(one)) for one in rows)
    share = facts.share(seconds) or 0.0
    if size_bytes < WIDE_BYTES and share < SOFTMAX_SHARE:
        return None
    return Seen(
        title=f"softmax over {_scores(rows[0])[-1]:,} values takes {share:.0%} of a step",
        evidence=f"{rows[0].name} of {rows[0].shapes}; two copies of the scores are {format_bytes(size_bytes)}",
        remedy="flatout.linear_cross_entropy, which never holds all scores; or an adaptive softmax",
        certain=False,
        cost_bytes=size_bytes,
        cost_share=share,
        lines=where(_lines_of(rows), facts.lines_calling("cross_entropy", "CrossEntropyLoss", "log_softmax")),
        command=facts.tune,
        plan={"loss": "chunked"},
    )


@check(
    means="A module computes attention with a softmax between two products, and writes the scores to memory.",
    needs="the module's code does that, it ran a softmax and not torch's own attention, the module takes at least 10 % "
    "of a step, and what a fused kernel does not need (softmax, masks, copies) at least 5 %; of the modules inside it, "
    "those count that have none of their own, such as a Softmax or a Dropout",
    if_wrong="results differ by rounding; attention weights are no longer there to be read",
)
def unfused_attention(facts: Facts) -> Seen | None:
    seen, profile = facts.observed, facts.profile
    kinds = {one.attention_by_hand for one in seen.modules if one.attention_by_hand} if seen is not None else set()
    if profile is None or not kinds:
        return None
    own = {one: _own_rows(one, profile) for one in profile.modules if one.kind in kinds}
    own = {one: rows for one, rows in own.items() if any(row.operator_class == "softmax" for row in rows)}
    inside = [row for rows in own.values() for row in rows]
    if not inside or any(TORCHS_ATTENTION in row.name for row in inside):
        return None
    whole = facts.share(sum(one.seconds for one in own)) or 0.0
    rows = [row for row in inside if row.operator_class in SCORES]
    cost = sum(one.seconds for one in rows)
    share = facts.share(cost) or 0.0
    if whole < ATTENTION_SHARE or share < LAYER_SHARE:
        return None
    return Seen(
        title=f"attention is computed by hand, in {whole:.0%} of a step",
        evidence=f"{', '.join(sorted({one.kind for one in own}))}: softmax, masks and copies between its products take "
        f"{format_seconds(cost)} a step",
        remedy="torch.nn.functional.scaled_dot_product_attention(q, k, v), with is_causal=True if later positions are "
        "masked, and dropout_p if the weights are dropped out",
        certain=False,
        cost_seconds=cost,
        lines=where(facts.lines_calling("softmax"), _lines_of(rows)),
        command=facts.tune,
        plan={"attention": "fused"},
    )


@check(
    means="A module of the script computes a layer that torch.nn has.",
    needs="its forward is recognised in the source, and it takes at least 5 % of a step",
    if_wrong="results differ by rounding; names of weights in checkpoints may change",
)
def hand_written_layer(facts: Facts) -> Seen | None:
    if facts.source is None or facts.profile is None:
        return None
    for layer in facts.source.layers:
        rows = [one for one in facts.profile.modules if one.kind == layer.name]
        share = facts.share(sum(one.seconds for one in rows))
        if rows and share is not None and share >= LAYER_SHARE:
            return Seen(
                title=f"{layer.name} is torch.nn.{layer.torchs} written by hand",
                evidence=f"{layer.line[0]}:{layer.line[1]}; it takes {share:.0%} of a step, as several operators",
                remedy=f"torch.nn.{layer.torchs}, one operator",
                certain=False,
                fault=True,
                lines=where(layer.line),
                unknown="torch's layer was not timed in its place",
            )
    return None


def _own_rows(module: ModuleRow, profile: Profile) -> list[OperatorRow]:
    """What its code runs, by itself or by modules right in it that have no others in them."""
    start = f"{module.path}."
    below = [one.path for one in profile.modules if one.path.startswith(start)]
    leaves = {
        path
        for path in below
        if "." not in path.removeprefix(start) and not any(other.startswith(f"{path}.") for other in below)
    }
    return [row for row in profile.operators if row.module == module.path or row.module in leaves]


def _scores(row: OperatorRow) -> list[int]:
    """Their shape: what a softmax takes first."""
    return next(iter(sizes_in(row.shapes)), [0])


def _lines_of(rows: list[OperatorRow]) -> list[SourceLine]:
    longest = sorted(rows, key=lambda row: -row.seconds)[:3]
    return [line for one in longest if (line := source_line(one.line)) is not None]
