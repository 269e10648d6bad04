"""Where weights and data are, how they get there, and what makes the host or the device wait."""

from __future__ import annotations

from flatout.diagnose.check import Seen, check, source_line, where
from flatout.diagnose.facts import Facts
from flatout.units import format_seconds

COPY_SHARE, SYNC_SHARE, REPEATED_SHARE = 0.02, 0.02, 0.02
LEAST_REPEATED = 3
IDLE_SHARE = 0.5
LAUNCH_SECONDS = 10e-6
"""Of an operator on a GPU's host, Python included: 7 on an H100's for the operation alone."""
CLEARLY_FASTER = 2.0
ANY_CPUS_FLOPS_PER_SECOND = 20e9
"""Two cores of ten years ago reach it; assumed where the CPU was not measured."""


@check(
    means="Batches are copied to the GPU from pageable memory, which the driver first copies to pinned memory while "
    "the host waits.",
    needs="such copies, and the time after them for which the GPU has no work, take at least 2 % of a step",
    if_wrong="pinned memory is taken from the host's other uses",
)
def pageable_copies(facts: Facts) -> Seen | None:
    if facts.profile is None or not facts.on_gpu:
        return None
    copies = [
        one for one in facts.profile.kernels if one.kind == "copy" and "HtoD" in one.name and "Pageable" in one.name
    ]
    seconds = sum(one.seconds for one in copies) + _idle_after(facts, "copies")
    share = facts.share(seconds)
    if not copies or share is None or share < COPY_SHARE:
        return None
    return Seen(
        title=f"copies from pageable memory take {share:.0%} of a step",
        evidence=f"{sum(one.calls for one in copies):,.0f} copies a step, {format_seconds(seconds)} with the time "
        "after them for which the GPU has no work",
        remedy="DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)",
        cost_seconds=seconds,
        lines=where(facts.lines_calling("to", "cuda", in_training_loop=True), facts.lines_calling("DataLoader")),
        command=facts.tune,
        plan={"pin_memory": True, "non_blocking": True},
    )


@check(
    means="The same tensor is converted or moved in the same way again and again.",
    needs="an unchanged tensor is converted in at least 3 steps at one line, at 2 % of a step or more",
    if_wrong="one extra variable",
)
def repeated_to(facts: Facts) -> Seen | None:
    seen = facts.seen
    if not seen.steps:
        return None
    repeated = [one for one in seen.calls if one.repeated >= LEAST_REPEATED and 2 * one.repeated >= seen.steps]
    cost = sum(one.seconds * one.repeated / one.calls for one in repeated) / seen.steps
    share = facts.share(cost)
    if not repeated or share is None or share < REPEATED_SHARE:
        return None
    repeated.sort(key=lambda one: -one.seconds)
    return Seen(
        title=f"the same tensor is converted in every step: {share:.0%} of a step",
        evidence="; ".join(
            f"{one.line[0]}:{one.line[1]} .{one.method}(): {one.repeated} of {one.calls} calls converted a tensor "
            "that had not changed"
            for one in repeated[:3]
        ),
        remedy="convert it once before the loop, and keep the result",
        cost_seconds=cost,
        lines=where([one.line for one in repeated]),
    )


@check(
    means="The script reads values from the GPU, or needs sizes that it computes (masks, nonzero): the host waits "
    "until the GPU is done, which then has no work until more is queued.",
    needs="the GPU is idle for at least 2 % of a step after such waits, by the recorded kernels",
    if_wrong="a value is printed later than it was computed",
)
def hidden_sync(facts: Facts) -> Seen | None:
    if facts.profile is None or not facts.on_gpu:
        return None
    cost, waits = _idle_after(facts, "sync"), facts.profile.waits
    share = facts.share(cost)
    if share is None or share < SYNC_SHARE:
        return None
    return Seen(
        title=f"waiting for the GPU leaves it without work for {share:.0%} of a step",
        evidence="; ".join(
            f"{one.line or 'line unknown'} {one.operator.removeprefix('aten::') or 'synchronize'}: {one.calls:.3g} a "
            f"step, {format_seconds(one.seconds)}"
            for one in waits[:4]
        ),
        remedy="keep values on the device, and read them once in many steps; torch.where instead of a mask's indices",
        cost_seconds=cost,
        lines=where([line for one in waits if (line := source_line(one.line)) is not None]),
    )


def _idle_after(facts: Facts, cause: str) -> float:
    """Seconds of a step for which the GPU is idle for this cause."""
    causes = facts.profile.idle_causes if facts.profile is not None else ()
    return sum(one.seconds for one in causes if one.cause == cause)


@check(
    means="The script trains on the CPU although this machine has a GPU that torch can use.",
    needs="all weights are on the CPU, and a step takes at least twice as long as a GPU's host needs to launch it, at "
    "10 microseconds an operator",
    if_wrong="the model may be slower on the GPU",
)
def model_on_cpu(facts: Facts) -> Seen | None:
    seen = facts.observed
    if seen is None or seen.device != "cpu" or not facts.gpus or not seen.modules or "cuda" in facts.seen.devices:
        return None
    calls = facts.profile.operator_calls if facts.profile is not None else None
    if calls and facts.step_seconds and facts.step_seconds < CLEARLY_FASTER * LAUNCH_SECONDS * calls:
        return None
    return Seen(
        title="the script trains on the CPU although there is a GPU",
        evidence=f"the weights are on the CPU; torch can use {', '.join(facts.gpus)}",
        remedy="model.to('cuda') before the optimizer is made, and for each batch flatout.to_device(batch, "
        "flatout.device()); or let a plan move it"
        + (", once the script no longer chooses its device itself" if seen.names_device else ""),
        fault=True,
        lines=where(facts.lines_calling("device")),
        command=None if facts.planned or seen.names_device else f"flatout tune {facts.command}",
        unknown="the script was not timed on the GPU",
    )


@check(
    means="A part of the model is on another device than the rest.",
    needs="parameters or buffers of a model that trains are both on the CPU and on a GPU",
    if_wrong="a part that was meant to save GPU memory takes some of it",
)
def mixed_devices(facts: Facts) -> Seen | None:
    seen, devices = facts.seen, facts.seen.devices
    if len(devices) < 2 or "cpu" not in devices or devices.get("meta"):
        return None
    counts = ", ".join(f"{count:,} on {device}" for device, count in sorted(devices.items(), key=lambda one: -one[1]))
    return Seen(
        title="a part of the model is on another device",
        evidence=f"numbers in parameters and buffers: {counts}; for example {seen.device_example}",
        remedy="move the whole model: model.to(device) moves what is registered; use register_buffer for constants",
        fault=True,
        certain=False,
        lines=where(facts.lines_calling("cpu"), facts.lines_calling("to", "cuda")),
        unknown="it was not timed in one place",
    )


@check(
    means="The model is so small that this machine's CPU would train it faster than its GPU.",
    needs="the GPU idles for half of a step or more, and the products of a step at a quarter of the CPU's measured "
    "rate (of 20 GFLOP/s, where it was not measured), with what calling its operators takes, need less than half of it",
    if_wrong="the script is slower on the CPU, and moves back",
)
def slower_on_gpu(facts: Facts) -> Seen | None:
    profile, step = facts.profile, facts.step_seconds
    if profile is None or not facts.on_gpu or profile.parts is None or step is None:
        return None
    if profile.flops is None or not profile.operator_calls:
        return None
    idle = profile.parts.idle / step
    host = sum(one.host_seconds for one in facts.operators)
    rate = facts.cpu_flops_per_second or ANY_CPUS_FLOPS_PER_SECOND
    if idle < IDLE_SHARE or CLEARLY_FASTER * (profile.flops / (0.25 * rate) + 0.5 * host) > step:
        return None
    return Seen(
        title="this model would train faster on the CPU",
        evidence=f"the GPU is idle for {idle:.0%} of a step of {format_seconds(step)}, whose products are "
        f"{profile.flops / 1e9:.3g} GFLOP",
        remedy="a larger batch, CUDA graphs (torch.compile(mode='reduce-overhead')), or the CPU",
        certain=False,
        fault=True,
        lines=where(facts.lines_calling("to", "cuda")),
        unknown="the script was not timed on the CPU",
    )
