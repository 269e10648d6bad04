"""Several devices, several processes, several threads."""

from __future__ import annotations

from flatout.diagnose.check import Seen, check, where
from flatout.diagnose.facts import Facts
from flatout.script.behaviour_seen import ParallelSeen

LEAST_STEPS = 3
ACCUMULATING = 1.8


def _wrappers(facts: Facts, kind: str) -> list[ParallelSeen]:
    return [one for one in facts.behaviour.parallel if one.kind == kind] if facts.behaviour is not None else []


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
    seen = facts.behaviour
    if seen is None:
        return None
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
            cost_share=facts.share(cost),
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
    seen = facts.behaviour
    if seen is None or seen.steps < LEAST_STEPS or seen.zero_grad_fills:
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
