"""Several devices, several threads, and ranks that train together: does one hold the others up, does communication?"""

from __future__ import annotations

from flatout.diagnose.check import Seen, check, where
from flatout.diagnose.facts import Facts
from flatout.script.behaviour_seen import ParallelSeen
from flatout.script.rank_balance import RankBalance, rank_balance
from flatout.units import format_seconds

LEAST_STEPS = 3
ACCUMULATING = 1.8
LEAST_STRAGGLER_SHARE, LEAST_EXPOSED_SHARE = 0.1, 0.1
"""Of a step. Ranks are never quite alike, and some communication is never overlapped: the last gradients are there when
the backward pass has ended."""
COMPUTES_MORE = (
    "look at its batches and its device: larger batches or longer sequences than on the other ranks, a slower device, "
    "processes that share it"
)
REMEDIES = {
    "data": "look at what its loader does: its share of the data, its workers, the disk that it reads from",
    "transfer": "look at how its batches get to its device: pinned memory, and which cores its process may use",
    "forward": COMPUTES_MORE,
    "backward": COMPUTES_MORE,
    "optimizer": "look at which parameters its optimizer holds, and at what else uses its device",
    "other": "look at what the script does on that rank alone in each step: logging, metrics, writing files",
}


def _wrappers(facts: Facts, kind: str) -> list[ParallelSeen]:
    return [one for one in facts.seen.parallel if one.kind == kind]


@check(
    means="DataParallel copies the model to every GPU in every step, and runs them from one Python process.",
    needs="a model that trains is wrapped in it",
    if_wrong="DistributedDataParallel needs a process for each GPU (torchrun)",
)
def data_parallel(facts: Facts) -> Seen | None:
    found = _wrappers(facts, "DataParallel")
    if not found:
        return None
    devices = found[0].devices
    spread = f"over {devices} GPUs" if devices else "without a GPU: it only adds a call"
    return Seen(
        title=f"the model is wrapped in DataParallel, {spread}",
        evidence="each step sends the weights to all GPUs and gathers the outputs on one"
        if devices > 1
        else "there is no second GPU to use",
        remedy="DistributedDataParallel, one process for each GPU: torchrun --nproc-per-node=gpu"
        if devices > 1
        else "leave it out, or use DistributedDataParallel",
        fault=devices > 1,
        lines=where(facts.lines_calling("DataParallel")),
        unknown="it was not timed with DistributedDataParallel",
    )


@check(
    means="Gradients are exchanged after every micro-batch, not once per optimizer step.",
    needs="DistributedDataParallel, two or more backward passes a step, and an exchange in each of them",
    if_wrong="gradients differ between processes until the last micro-batch",
)
def accumulation_without_no_sync(facts: Facts) -> Seen | None:
    seen = facts.seen
    passes = sum(one.per_step for one in seen.backwards)
    for one in _wrappers(facts, "DistributedDataParallel"):
        exchanged = one.synchronised_per_step
        if exchanged is None or passes < ACCUMULATING or exchanged < ACCUMULATING or seen.steps < LEAST_STEPS:
            continue
        if len(seen.backwards) > 1 or any(back.callers > 1 for back in seen.backwards):
            continue  # several losses, each with its own pass, or with its own call of a function that makes it
        spent = facts.part_seconds("communication")
        cost = spent * (exchanged - 1) / exchanged if spent else None
        return Seen(
            title=f"gradients are exchanged {exchanged:.2g} times per optimizer step",
            evidence=f"{passes:.2g} backward passes a step, {exchanged:.2g} of them with an exchange",
            remedy="with model.no_sync(): around all micro-batches but the last",
            fault=True,
            lines=where([back.line for back in seen.backwards], facts.lines_calling("DistributedDataParallel", "DDP")),
            cost_seconds=cost,
            unknown="" if cost is not None else "the time of the exchange was not measured",
        )
    return None


@check(
    means="DistributedDataParallel searches the graph for unused parameters in every step, and there are none.",
    needs="find_unused_parameters=True, and every parameter got a gradient in each step that was watched; zero_grad "
    "does not fill gradients with zeros, which would hide a missing one",
    if_wrong="a step in which a parameter is not used ends with an error",
)
def needless_find_unused_parameters(facts: Facts) -> Seen | None:
    seen = facts.seen
    if seen.steps < LEAST_STEPS or seen.zero_grad_fills:
        return None
    for one in _wrappers(facts, "DistributedDataParallel"):
        if one.find_unused and not one.unused_parameters:
            return Seen(
                title="find_unused_parameters=True finds none",
                evidence=f"every parameter had a gradient after each of {seen.steps} steps",
                remedy="leave it out: the graph is then not searched in each step",
                certain=False,
                lines=where(
                    [call.line for call in facts.source.with_option("find_unused_parameters", True)]
                    if facts.source is not None
                    else None
                ),
                unknown="it was not timed without",
            )
    return None


@check(
    means="Torch computes with more threads than there are cores for this process.",
    needs="torch.get_num_threads() is above the cores that the affinity and the cgroup allow",
    if_wrong="fewer threads than cores leave some idle",
)
def thread_oversubscription(facts: Facts) -> Seen | None:
    machine = facts.machine
    threads = facts.observed.threads if facts.observed is not None else None
    if machine is None or threads is None or facts.on_gpu:
        return None
    cores = machine.cpu.available_cores
    if threads <= cores:
        return None
    limit = f" ({machine.cpu.limited_by})" if machine.cpu.limited_by else ""
    return Seen(
        title=f"{threads} threads on {cores} core{'s' if cores != 1 else ''}",
        evidence=f"torch.get_num_threads() is {threads}; this process may use {cores}{limit}",
        remedy=f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}",
        fault=True,
        lines=where(facts.lines_calling("set_num_threads", "set_num_interop_threads")),
        unknown="it was not timed with fewer",
        command=facts.tune,
        plan={"threads": cores},
    )


# ranks


def _balance(facts: Facts) -> RankBalance | None:
    return None if facts.run is None else rank_balance(facts.run.ranks)


@check(
    means="One rank takes longer for its own work in each step, and the others wait for it.",
    needs="the waits of all ranks were timed; its excess is a tenth of a step or more, beyond what steps vary by and "
    "in most of them, and the others wait longer than it does",
    if_wrong="ranks that take turns at being slow are slow on average",
)
def straggler(facts: Facts) -> Seen | None:
    found = _balance(facts)
    if found is None or not found.certain or not found.step_seconds:
        return None
    share = found.excess_seconds / found.step_seconds
    if share < LEAST_STRAGGLER_SHARE:
        return None
    own, others = format_seconds(found.own_seconds), format_seconds(found.next_seconds)
    return Seen(
        title=f"the other ranks wait for {found.straggler} in each step",
        evidence=f"its own work takes {own} of a step, {others} on the next slowest; "
        f"{format_seconds(found.part_excess_seconds)} of the excess are in {found.part}; the others wait "
        f"{format_seconds(found.waited_seconds)} longer than it does",
        remedy=REMEDIES[found.part],
        certain=False,
        cost_seconds=found.excess_seconds,
        cost_share=share,
        command=_profile(facts),
    )


@check(
    means="Ranks wait for communication that no computation overlaps.",
    needs="the waits of all ranks were timed; the least of them, of the rank that the others wait for, is a tenth of a "
    "step or more",
    if_wrong="where ranks were watched in different steps, what they wait for each other in turns is in it",
)
def exposed_communication(facts: Facts) -> Seen | None:
    found = _balance(facts)
    if found is None or not found.step_seconds:
        return None
    share = found.exposed_seconds / found.step_seconds
    if share < LEAST_EXPOSED_SHARE:
        return None
    return Seen(
        title=f"ranks wait for communication: {share:.0%} of a step",
        evidence=f"the rank that waits least in each step waits {format_seconds(found.exposed_seconds)} of "
        f"{format_seconds(found.step_seconds)} in collectives, and computes nothing meanwhile",
        remedy="exchange less often or less: larger batches on each rank, several micro-batches a step under no_sync, "
        "gradients in 16 bits; and measure what lies between the ranks",
        certain=False,
        cost_seconds=found.exposed_seconds,
        cost_share=share,
        command=_check_network(facts),
    )


def _check_network(facts: Facts) -> str | None:
    ranks = facts.run.ranks if facts.run is not None else ()
    count = max((one.ranks or 1 for one in ranks), default=1)
    return f"flatout launch --check --nproc-per-node {count}"


def _profile(facts: Facts) -> str | None:
    if facts.profile is not None:
        return None
    devices = facts.run.devices if facts.run is not None else None
    options = f" --devices {devices}" if devices is not None else ""
    return f"flatout profile{options} {facts.command}" if facts.command else None
