"""The measures that `fit_to_memory` chooses from: what each is, where it applies, what goes with what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flatout.levers.chunked_loss import LEAST_CLASSES, widest_output
from flatout.levers.compile import repeated_blocks
from flatout.levers.in_backward import hook_obstacle, optimizer_obstacle
from flatout.levers.low_bit import REMEDY, low_bit_obstacle
from flatout.memory.forecast import Target
from flatout.plan import Plan
from flatout.plan_choices import Exactness, allowed, contradiction, declared, worst
from flatout.sizing.training import Training
from flatout.train.split import batch_coupled_layers

Choices = dict[str, str | int]
"""Plan fields that a combination of measures adds."""
Key = tuple[tuple[str, str | int], ...]


def exactness_of(choices: Choices, *, mixes_samples: bool) -> Exactness:
    """That of the least exact among them.

    mixes_samples: do layers of the model? Then accumulation trains another model, with statistics of smaller batches.
    """
    if mixes_samples and "micro_batches" in choices:
        return "reduced"
    return worst(declared()[name].exactness for name in choices)


def measures_of(training: Training, target: Target, samples: int, exactness: Exactness) -> list[list[Choices]]:
    """The measures open to this training for steps of `samples`, by kind; at most one of each kind is taken.

    Those whose cost in time an operation count does not show come first, so that of equals the others are preferred.
    """
    plan = training.plan
    kinds: list[list[Choices]] = []
    blocks = len(repeated_blocks(training.model))
    if plan.optimizer_state is None and low_bit_obstacle(training.optimizer) is None:
        kinds.append([{"optimizer_state": "8bit"}])
    if plan.activation_offload is None and target.cuda:
        kinds.append([{"activation_offload": True}])
    if plan.activation_checkpointing is None and blocks:
        kinds.append(list(_checkpointings(blocks)))
    if plan.loss is None and plan.compile in (None, "regional") and widest_output(training.model) >= LEAST_CLASSES:
        kinds.append([{"loss": "chunked"}])
    if plan.precision is None:
        kinds.append([{"precision": "bf16"}])
    if plan.micro_batches is None and samples > 1:
        parts = [count for count in (2, 4, 8, 16, 32) if count <= samples]
        kinds.append([{"micro_batches": count} for count in parts])
    updates: Choices = {"optimizer_in_backward": True}
    if plan.optimizer_in_backward is None and not contradict(updates, plan) and not _in_backward_obstacle(training):
        kinds.append([updates])
    mixes_samples = bool(batch_coupled_layers(training.model))
    return [kind for kind in kinds if allowed(exactness_of(kind[0], mixes_samples=mixes_samples), exactness)]


def left_out(training: Training, target: Target, exactness: Exactness) -> list[str]:
    """Measures that are not offered here, and why."""
    found = []
    obstacle = low_bit_obstacle(training.optimizer)
    if obstacle is not None and training.plan.optimizer_state is None and exactness == "reduced":
        remedy = f" ({REMEDY})" if "torchao" in obstacle else ""
        found.append(f"optimizer_state 8bit: {obstacle}{remedy}")
    if training.plan.optimizer_in_backward is None and (obstacle := _in_backward_obstacle(training)):
        found.append(f"optimizer_in_backward: {obstacle}")
    coupled = batch_coupled_layers(training.model)
    if coupled and training.plan.micro_batches is None and exactness == "rounding":
        found.append(f"micro_batches: {coupled[0]} mixes the samples of a batch, which is not exact ('reduced')")
    if not target.cuda:
        found.append("activation_offload: on a CPU the activations are in the host's memory already")
    return found


def _in_backward_obstacle(training: Training) -> str:
    """Why parameters cannot be updated in the backward pass. A forecast does not see it: its copies have no hooks."""
    return optimizer_obstacle(training.optimizer) or hook_obstacle([training.model])


def _checkpointings(blocks: int) -> Iterator[Choices]:
    for kind in ("selective", "block"):
        yield {"activation_checkpointing": kind}
        for count in sorted({blocks // 4, blocks // 2, blocks * 3 // 4} - {0, blocks}):
            yield {"activation_checkpointing": kind, "checkpointed_blocks": count}


def strongest(kinds: list[list[Choices]], plan: Plan) -> Iterator[Choices]:
    """All measures together, each at its strongest; also without those that take memory themselves.

    bf16 casts weights; moments in 8 bits are fp32 while their parameter is updated, and while they are converted.
    """
    degrees = [[{}, *kind] if kind[0].keys() & {"precision", "optimizer_state"} else kind for kind in kinds if kind]
    for parts in itertools.product(*(_highest(kind) for kind in degrees)):
        choices = {name: value for part in parts for name, value in part.items()}
        if contradict(choices, plan):
            yield {name: value for name, value in choices.items() if name != "micro_batches"}
            yield {name: value for name, value in choices.items() if name != "optimizer_in_backward"}
        else:
            yield choices


def _highest(kind: list[Choices]) -> list[Choices]:
    if "activation_checkpointing" in kind[0]:
        return [{"activation_checkpointing": value} for value in ("block", "selective")]
    return kind if not kind[0] else kind[-1:]


def contradict(choices: Choices, plan: Plan) -> bool:
    """Can they not all be added to the plan?"""
    return contradiction({**plan.choices(), **choices}) is not None


def key_of(choices: Choices) -> Key:
    return tuple(sorted(choices.items()))


def label_of(choices: Choices) -> str:
    return ", ".join(f"{name}={value}" for name, value in choices.items()) or "the plan as given"
