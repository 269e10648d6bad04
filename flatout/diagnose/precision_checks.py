"""Number formats: what they cost, and where they lose what is learned."""

from __future__ import annotations

import math

from flatout.diagnose.check import Seen, check, source_line, where
from flatout.diagnose.facts import Facts
from flatout.precision.recurrent import MOST_ERROR
from flatout.profiling.profile import sizes_in
from flatout.units import format_seconds

PRODUCTS = ("matmul", "convolution")
LEAST_PRODUCT_SHARE, LEAST_RATIO, LEAST_SAVING = 0.5, 1.5, 0.2
UNALIGNED_SHARE = 0.1
MULTIPLE = 8
LOST_SHARE = 0.5
DENORMAL_SHARE, DENORMAL_SLOWDOWN = 0.01, 1.5
LEAST_DENORMAL_COST = 0.05


@check(
    means="Matmuls run in full fp32, although this machine is much faster at lower precision.",
    needs="fp32 products take at least half of a step, by their operations at the fp32 ceiling, and the measured "
    "ceilings say that bf16 or TF32 would save 20 % of it; where it is TF32, convolutions do not count, which use it "
    "by default",
    if_wrong="results differ by rounding: `flatout tune` compares losses and gradients before it keeps the change",
)
def fp32_matmul(facts: Facts) -> Seen | None:
    seen, machine = facts.observed, facts.machine
    if seen is None or machine is None or seen.autocast_in_script or facts.step_seconds is None:
        return None
    ceilings = seen.ceilings(machine)
    if ceilings is None or (facts.on_gpu and seen.matmul_precision != "highest"):
        return None
    peaks = ceilings.gemm_flops_per_second
    fast = "tf32" if facts.on_gpu and "tf32" in peaks else "bf16"
    if "fp32" not in peaks or fast not in peaks or fast not in (*machine.fast_dtypes, *machine.cpu.fast_dtypes):
        return None
    products = PRODUCTS if fast == "bf16" else ("matmul",)
    rows = [one for one in facts.operators if one.operator_class in products and one.dtype == "float32"]
    # Small products take longer than their operations: what they wait for takes as long in another format.
    peak = peaks["fp32"].value
    seconds = sum(one.seconds if one.flops is None else min(one.seconds, one.flops / peak) for one in rows)
    ratio = peaks[fast].value / peak
    rows.sort(key=lambda one: -one.seconds)
    share = facts.share(seconds) or 0.0
    saved = seconds * (1 - 1 / ratio) if ratio > 0 else 0.0
    if share < LEAST_PRODUCT_SHARE or ratio < LEAST_RATIO or saved / facts.step_seconds < LEAST_SAVING:
        return None
    return Seen(
        title=f"fp32 products take {share:.0%} of a step; {fast} is x{ratio:.1f} as fast here",
        evidence=f"{format_seconds(seconds)} a step in fp32; measured ceilings: x{ratio:.2f} in {fast}",
        remedy="torch.set_float32_matmul_precision('high')"
        if fast == "tf32"
        else "torch.autocast(..., dtype=bfloat16)",
        certain=False,
        cost_seconds=saved,
        lines=where([line for one in rows if (line := source_line(one.line)) is not None]),
        command=facts.tune,
        plan={"matmul_precision": "high"} if fast == "tf32" else {"precision": "bf16"},
    )


@check(
    means="Matmul dimensions keep the GPU from using its Tensor Cores, or from their full speed.",
    needs="on a GPU, products in 16 bits with a size that is not a multiple of 8 take at least 10 % of a step",
    if_wrong="a few extra rows of weights",
)
def unaligned_shapes(facts: Facts) -> Seen | None:
    if not facts.on_gpu:
        return None
    half = [one for one in facts.operators if one.dtype in ("float16", "bfloat16")]
    rows = [one for one in half if one.operator_class == "matmul" and _is_unaligned(one.shapes)]
    seconds = sum(one.seconds for one in rows)
    share = facts.share(seconds)
    if share is None or share < UNALIGNED_SHARE:
        return None
    rows.sort(key=lambda one: -one.seconds)
    return Seen(
        title=f"products with unaligned sizes take {share:.0%} of a step",
        evidence=f"{rows[0].name} of {rows[0].shapes}: sizes that are not multiples of {MULTIPLE}",
        remedy=f"round vocabulary and widths up to a multiple of {MULTIPLE} (64 for a vocabulary)",
        certain=False,
        lines=where([line for one in rows[:3] if (line := source_line(one.line)) is not None]),
        unknown="no aligned size was timed",
        fault=True,
    )


def _is_unaligned(shapes: str) -> bool:
    """Of '[64, 128] [128, 50257]': the last two sizes of each, without vectors."""
    return any(size > MULTIPLE and size % MULTIPLE for one in sizes_in(shapes) if len(one) > 1 for size in one[-2:])


@check(
    means="Training under fp16 autocast without a gradient scaler: small gradients become zero.",
    needs="autocast to float16 is on in forwards with gradients, no enabled GradScaler was used, and the loss is "
    "not multiplied",
    if_wrong="an extra scaler, which changes nothing where no gradient underflows",
)
def fp16_without_scaler(facts: Facts) -> Seen | None:
    seen = facts.seen
    if seen.autocast_dtype != "float16" or seen.scaler or not seen.backwards:
        return None
    if any(one.scaled for one in seen.backwards) or (facts.source is not None and facts.source.mentions("loss_scale")):
        return None
    return Seen(
        title="fp16 autocast without a gradient scaler",
        evidence=f"forwards ran under autocast to float16, and {sum(one.calls for one in seen.backwards)} backward "
        "passes started from an unscaled loss: gradients below 6e-8 become 0",
        remedy="torch.amp.GradScaler, or autocast to bfloat16, which needs none",
        fault=True,
        lines=where(facts.lines_calling("autocast"), [one.line for one in seen.backwards]),
        unknown="it costs accuracy, not time",
    )


@check(
    means="Under bf16 autocast, DataParallel computes in fp16: its threads have torch's default dtype.",
    needs="a model that trains is in DataParallel over several GPUs, and its forwards run under autocast to bfloat16",
    if_wrong="DistributedDataParallel needs a process for each GPU (torchrun)",
)
def bf16_lost_in_data_parallel(facts: Facts) -> Seen | None:
    wrapped = any(one.kind == "DataParallel" and one.devices > 1 for one in facts.seen.parallel)
    if not wrapped or facts.seen.autocast_dtype != "bfloat16":
        return None
    return Seen(
        title="bf16 autocast becomes fp16 in DataParallel",
        evidence="torch's DataParallel computes in a thread for each GPU, where autocast is on and its dtype is "
        "float16: values above 65,504 become inf, and gradients below 6e-8 become 0",
        remedy="DistributedDataParallel, one process for each GPU: torchrun --nproc-per-node=gpu; or put "
        "torch.autocast('cuda', dtype=torch.bfloat16) inside the model's forward",
        fault=True,
        lines=where(facts.lines_calling("autocast"), facts.lines_calling("DataParallel")),
        unknown="it costs accuracy, not time",
    )


@check(
    means="An SGD with fused=True does not train weights in 16 bits on a CPU: torch's kernel stores no updates.",
    needs="an SGD that was built with fused=True steps parameters on the CPU in such a type, and the kernel, tried on "
    "a tensor of that type, leaves it as it was",
    if_wrong="the optimizer's step takes longer without its fused kernel",
)
def fused_sgd_in_16_bits(facts: Facts) -> Seen | None:
    seen = facts.seen
    if not seen.untrained_dtypes:
        return None
    dtypes = " and ".join(seen.untrained_dtypes)
    return Seen(
        title=f"SGD with fused=True does not train {dtypes} weights on a CPU",
        evidence="tried on a tensor of its own, torch's kernel leaves it as it was (pytorch issue 191763)",
        remedy="leave fused=True out, or keep the weights in fp32 and use torch.autocast",
        fault=True,
        lines=where(facts.lines_calling("SGD"), seen.optimizer_lines),
        unknown="it changes what is learned, not the time",
    )


@check(
    means="The optimizer updates weights in 16 bits: updates smaller than its rounding are lost.",
    needs="parameters in an optimizer are float16; or bfloat16 ones of which at least half of the numbers with a "
    "gradient stay exactly the same in a step",
    if_wrong="fp32 weights take twice the memory",
)
def half_weights(facts: Facts) -> Seen | None:
    seen, lost = facts.seen, facts.seen.unchanged_share
    half = "float16" in seen.optimizer_dtypes
    rounded = "bfloat16" in seen.optimizer_dtypes and "bfloat16" not in seen.untrained_dtypes
    brain = rounded and lost is not None and lost >= LOST_SHARE and seen.weights_move is True
    if not half and not brain:
        return None
    dtype = "float16" if half else "bfloat16"
    shown = f"; {lost:.0%} of the numbers with a gradient did not change in a step" if lost is not None else ""
    return Seen(
        title=f"the optimizer updates {dtype} weights without fp32 copies",
        evidence=f"parameters in the optimizer are {dtype}{shown}",
        remedy="keep the weights in fp32 and use autocast: model.float(), torch.autocast(...)",
        fault=True,
        certain=half,
        lines=where(facts.lines_calling("half", "bfloat16"), facts.lines_calling("to"), seen.optimizer_lines),
        unknown="it costs accuracy, not time",
    )


@check(
    means="Gradients of an LSTM in 16 bits are wrong on this processor.",
    needs="an LSTM layer trains on the CPU in bfloat16, by the script's own autocast or weights, and a layer of its "
    "size, tried alone, has a gradient of its input that is off by more than 10 %; rounding makes 0.5 to 1 %",
    if_wrong="the layer runs in fp32, which takes longer",
)
def wrong_lstm_gradients(facts: Facts) -> Seen | None:
    seen, observed = facts.seen, facts.observed
    if facts.planned and (observed is None or not observed.autocast_in_script):
        return None  # autocast by a plan runs such layers in fp32
    wrong = [one for one in seen.recurrent if one.gradient_error > MOST_ERROR]
    if not wrong:
        return None
    worst = max(wrong, key=lambda one: one.gradient_error)
    return Seen(
        title=f"{worst.dtype} gradients of an LSTM with {worst.units:,} units are wrong on this processor",
        evidence="; ".join(
            f"nn.LSTM({one.inputs}, {one.units}), tried alone: the gradient of its input is off by "
            f"{one.gradient_error:.0%} of its size in fp32"
            for one in wrong
        ),
        remedy="call the layer inside torch.autocast('cpu', enabled=False), with fp32 inputs; or another hidden size",
        fault=True,
        lines=where(facts.lines_calling("LSTM"), facts.lines_calling("autocast"), seen.optimizer_lines),
        unknown="it costs accuracy, not time",
    )


@check(
    means="Values below 1.2e-38 slow the processor down.",
    needs="at least 1 % of a step's values are such, this processor was measured to be slower with them, and that "
    "adds 5 % to a step or more",
    if_wrong="values that were nearly 0 become 0",
)
def denormals(facts: Facts) -> Seen | None:
    seen = facts.observed
    if seen is None or seen.device != "cpu" or seen.flush_denormals:
        return None
    known = facts.seen if facts.seen.denormal_share is not None else seen
    share, slowdown = known.denormal_share or 0.0, known.denormal_slowdown or 1.0
    added = share * (slowdown - 1)
    cost_share = added / (1 + added)
    if share < DENORMAL_SHARE or slowdown < DENORMAL_SLOWDOWN or cost_share < LEAST_DENORMAL_COST:
        return None
    step = facts.step_seconds
    return Seen(
        title=f"{share:.1%} of the values are denormal numbers",
        evidence=f"this processor takes x{slowdown:.1f} as long for them, as measured here",
        remedy="torch.set_flush_denormal(True), before the first operation",
        cost_seconds=cost_share * step if step is not None and math.isfinite(step) else None,
        cost_share=cost_share,
        certain=False,
        lines=where(facts.seen.denormal_lines),
        command=facts.tune,
        plan={"flush_denormals": True},
    )
