"""What other tools say to the same question. Each takes a case and a batch size, and gives bytes.

accelerate and DeepSpeed count weights and multiply; torch's MemTracker runs the step on fake tensors, as Flatout does.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.memory.cases import Case
from flatout import TrainStep


def accelerate(case: Case, batch_size: int) -> int:
    """`accelerate estimate-memory`: the largest of its figures for training with Adam, which it shows as the peak."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(case.subject.make())
    return max(estimate_training_usage(total, "bfloat16" if "precision" in case.choices else "float32").values())


def deepspeed(case: Case, batch_size: int) -> int:
    """estimate_zero2_model_states_mem_needs, one GPU, nothing offloaded: model states alone, as its name says."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs, model_to_params

        parameters = model_to_params(case.subject.make())
        return estimate_zero2_model_states_mem_needs(parameters, 1, 1, cpu_offload=False)[1]


def mem_tracker(case: Case, batch_size: int) -> int:
    """torch.distributed._tools.mem_tracker.MemTracker: peak of two fake steps, the same ones as are measured."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._pytree import tree_leaves

    tracker = MemTracker()

    def loss_fn(model: Any, batch: Any) -> Any:
        tracker.reset_mod_stats()  # it refuses a second forward otherwise
        return case.subject.loss_fn(model, batch)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = case.subject.make()
        optimizer = case.optimizer_of(model)
        batch = case.subject.batch(batch_size)
        step = TrainStep(model, optimizer, loss_fn, case.plan())
        inputs = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
        tracker.track_external(model, optimizer, *inputs)
        with tracker:
            for _ in range(2):
                step(batch)
        found: Any = tracker.get_tracker_snapshot("peak")
    return int(found[torch.device("cpu")]["Total"])


OF_THE_MODEL = ("accelerate", "DeepSpeed ZeRO-2")
"""These say the same for every batch size."""
PEERS: dict[str, Callable[[Case, int], int]] = {
    "accelerate": accelerate,
    "DeepSpeed ZeRO-2": deepspeed,
    "torch MemTracker": mem_tracker,
}
