"""One training as one value: the subject of forecasts, searches and real tries.

It is taken from a TrainStep, whose levers are already on its model and optimizer. So no step is ever made of those: a
forecast makes one of copies, a real try one of other objects over the same memory. A copy of a module, a parameter or
an optimizer has none of their levers (hooks and replaced calls are not copied), and so each is applied exactly once.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flatout.arguments import as_instance, as_whole_number
from flatout.data.nested import batch_length, tensors_in
from flatout.errors import UsageError
from flatout.generators import generators_kept
from flatout.parameters import copy_own_attributes, parameters_of
from flatout.plan import Plan
from flatout.plan_choices import declared
from flatout.terminal import is_terminal
from flatout.torch_private.attributes import CAPTURE_WAS_WARNED_OF, COMPILED_CALL
from flatout.train.loss import LossFn
from flatout.train.loss_variables import with_own_variables
from flatout.train.step import TrainStep

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from flatout.machine.ranks import PretendedExchange
    from flatout.memory.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer, the loss, a batch of the right kinds and shapes, and how it is to run."""

    origin: TrainStep
    """The step that they are from; what a plan does not say (clipping, how terms are counted) is as there."""
    model: nn.Module
    optimizer: Optimizer
    loss_fn: LossFn
    batch: object
    plan: Plan
    samples: int
    """How many the batch has."""
    ranks: int = 1
    """How many train together; this is one of them, and the batch is its share."""
    rank: int = 0
    """Which of them."""
    exchange: PretendedExchange | None = None
    """Where ranks are not alike: what they say to each other while one after the other is pretended."""

    @classmethod
    def of(cls, step: TrainStep, batch: object) -> Training:
        """That of a TrainStep. UsageError for anything else, and for a batch without a number of samples."""
        remedy = "make one: step = flatout.TrainStep(model, optimizer, loss_fn, plan)"
        as_instance(step, "step", TrainStep, limit="it is a flatout.TrainStep", remedy=remedy)
        if step.plan.parallel == "dp":
            limit = "what each GPU of one process holds is not forecast"
            raise UsageError("parallel is 'dp'", limit=limit, remedy="drop it: one GPU then holds the whole batch")
        samples = _samples_of(batch)
        return cls(
            origin=step,
            model=step.model,
            optimizer=step.optimizer,
            loss_fn=step.loss_fn,
            batch=batch,
            plan=step.plan,
            samples=samples,
        )

    def samples_wanted(self, batch_size: int | None) -> int:
        """So many as were asked for; None: as the batch has."""
        return self.samples if batch_size is None else as_whole_number(batch_size, "batch_size")

    def under(self, plan: Plan) -> Training:
        return replace(self, plan=plan)

    def on_copies(
        self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, batch: object, samples: int
    ) -> Training:
        """The same training with copies of its parts."""
        for module in model.modules():  # a class may copy its instances in its own way, replaced calls included
            module.__dict__.pop(COMPILED_CALL, None)
        own = with_own_variables(loss_fn)
        return replace(self, model=model, optimizer=optimizer, loss_fn=own, batch=batch, samples=samples)

    def make_step(self) -> TrainStep:
        """A step under the plan, of parts that nothing else trains."""
        assert self.model is not self.origin.model, "its levers are on already"
        return self.origin.for_copies(self.plan, self.model, self.optimizer, self.loss_fn)

    @property
    def steps_followed(self) -> int:
        """Until one is like all that follow: the first makes the optimizer's state, and DDP begins with the second."""
        return 2 if self.ranks == 1 or self.plan.parallel == "pipeline" else 3

    @property
    def device_type(self) -> str:
        """Where the model is: 'cpu' or 'cuda'."""
        return next((one.device.type for one in self.model.parameters()), "cpu")

    def weights(self) -> Iterator[Tensor]:
        """Parameters and buffers of the model, then what else the optimizer trains: a loss may have weights too."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        own = {id(one) for one in self.model.parameters()}
        yield from (one for one in parameters_of(self.optimizer) if id(one) not in own)

    def parameters(self) -> Iterator[Tensor]:
        """What gets a gradient in a step."""
        seen = {id(one): one for one in (*self.model.parameters(), *parameters_of(self.optimizer))}
        return iter(seen.values())

    def held(self) -> Iterator[Tensor]:
        """Tensors that exist before a step. The user's other tensors are not this training's."""
        yield from self.weights()
        yield from _state_tensors(self.optimizer)

    @contextlib.contextmanager
    def on_same_memory(self) -> Iterator[Training]:
        """The same training with objects of its own over the same tensors' memory, for real steps.

        At the end weights, buffers, the optimizer's state and the random generators are restored bit for bit; copies
        of them are in the host's memory meanwhile. Modes, gradients, hooks and counters were never shared.
        """
        import torch

        from flatout.memory.tracking import plain_tensors

        kept = [_distinct(inner) for one in self.held() for inner in plain_tensors(one)]
        copies = [one.detach().to("cpu", copy=True) for one in kept]
        try:
            with generators_kept():
                yield self.on_copies(*_over_same_memory(self), self.batch, self.samples)
        finally:
            for one, before in zip(kept, copies, strict=True):
                with torch.inference_mode() if one.is_inference() else torch.no_grad():
                    one.copy_(before)


def carried_out(plan: Plan, ranks: int = 1) -> Plan:
    """What a fake run can do and memory depends on. fp16 runs as bf16, which is as large and reads no value."""
    of_ranks = ("parallel", "batch_norm", "fsdp_dtype", "fsdp_keep_gathered", "tensor_ranks") if ranks > 1 else ()
    plan = plan.without(
        *(name for name in plan.choices() if not declared()[name].in_forecasts and name not in of_ranks)
    )
    return replace(plan, precision="bf16") if plan.precision == "fp16" else plan


def never_split(plan: Plan) -> Plan:
    """A size that does not fit must not pass for one that does."""
    if plan.out_of_memory == "raise":
        return plan
    return plan.with_choice("out_of_memory", "raise", "a size is tried whole or not at all")


def for_a_try(plan: Plan) -> Plan:
    """Uncompiled, and whole."""
    return never_split(plan.without(*(() if plan.compile is None else ("compile",))))


def never_captured(optimizer: Optimizer) -> None:
    """Mark a copied optimizer as checked: a copy loses that, and torch asks Adafactor for a setting that it lacks."""
    setattr(optimizer, CAPTURE_WAS_WARNED_OF, True)


def follow_steps(tracker: Tracker, training: Training, closing: contextlib.ExitStack) -> TrainStep:
    """Two steps of copies, on fake tensors or small real ones, each tensor named as what it is. Plan: `carried_out`.

    `closing` closes the step after tracking has ended, because what closing allocates is no part of a step.
    """
    model, batch = training.model, training.batch
    tracker.model = training
    closing.callback(setattr, tracker, "model", None)  # it is part of cycles, which would keep the user's step alive
    if not model.training:
        model.train()
    _drop_gradients(training)
    tracker.hold(training.weights(), "weights")
    tracker.hold((one for _, one in tensors_in(batch)), "inputs")
    tracker.hold(_state_tensors(training.optimizer), "optimizer")
    tracker.in_step = False
    step = training.make_step()
    closing.callback(step.close)
    tracker.hold(training.weights(), "weights")  # a lever may have changed their layout
    tracker.in_step = True
    for number in range(training.steps_followed):
        tracker.step = number
        step(batch)
    return step


def _drop_gradients(training: Training) -> None:
    for parameter in training.parameters():  # a name for the last one, in `follow_steps`, would keep it alive
        parameter.grad = None


def tell_terminal(line: str) -> None:
    """Progress where the caller gave no function for it: a line on a terminal's standard error."""
    if is_terminal(sys.stderr):
        sys.stderr.write(f"flatout: {line}\n")


def _over_same_memory(training: Training) -> tuple[nn.Module, Optimizer, LossFn]:
    """Model, optimizer and loss whose tensors share their memory with the training's."""
    import torch

    from flatout.memory.fake_run import generators_in

    model, optimizer, loss_fn = training.model, training.optimizer, training.loss_fn
    memo: dict[int, object] = {id(one): one.clone_state() for one in generators_in((model, loss_fn))}
    memo |= {id(one): one.detach() for one in model.buffers()}
    memo |= {id(one): one for one in _state_tensors(optimizer)}
    for one in (*model.parameters(), *parameters_of(optimizer)):
        if isinstance(one, torch.nn.Parameter):
            memo[id(one)] = type(one)(one.detach(), one.requires_grad)  # without the hooks of the step in use
        else:
            memo[id(one)] = one.detach().requires_grad_(one.requires_grad)
    try:
        found = copy.deepcopy((model, optimizer, loss_fn), memo)
        copy_own_attributes(optimizer, found[1], memo)
    except Exception as error:
        raise cannot_be_copied(error) from error
    never_captured(found[1])
    return found


def cannot_be_copied(error: Exception) -> UsageError:
    return UsageError(
        f"the model cannot be copied: {type(error).__name__}: {error}",
        limit="it is examined and tried in a copy, so that yours stays as it is",
        remedy="keep files, locks and generators out of the model and the loss function",
    )


def _distinct(tensor: Tensor) -> Tensor:
    """A view of each place once: what is expanded cannot be written otherwise."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    yield from (one for state in optimizer.state.values() for _, one in tensors_in(state))


def _samples_of(batch: object) -> int:
    """How many samples an example batch has; at least one."""
    try:
        samples = batch_length(batch)
    except UsageError as error:  # its remedies are those of a training, which need not count samples
        raise UsageError(
            error.what,
            limit=error.limit,
            remedy="pass only tensors with an entry for each sample, others, such as an edge_index, through loss_fn: "
            "functools.partial(loss_fn, edge_index=edge_index); or run the script itself: flatout memory train.py",
        ) from error
    except Exception as error:
        raise UsageError(
            f"the example batch is a {type(batch).__name__}",
            limit="its tensors must share their first size, the number of samples",
            remedy="give a batch as the loss function takes it",
        ) from error
    if samples < 1:
        raise UsageError(
            "the example batch has 0 samples", limit="at least 1 is needed", remedy="give a batch as it comes"
        )
    return samples
