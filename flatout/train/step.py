"""One training step: forward, backward, clip, optimizer, schedule. The loop around it stays the user's.

    step = TrainStep(model, optimizer, loss_fn, Plan(precision="bf16", micro_batches=4), clip_norm=1.0)
    for batch in batches:
        loss = step(batch)                   # a device tensor: nothing waits until it is read

One call is one step of the optimizer, whatever the plan does inside: `micro_batches` splits the batch, and a batch that
does not fit into memory is split further and tried again. The gradient is still that of the mean loss over the whole
batch, each part weighted by the number of terms in its mean (see `flatout.train.loss`).

With the plan's `parallel`, or a model in DistributedDataParallel or fully_shard, each rank trains on its share of a
batch, and the update is that of the whole batch.

Under DDP a rank whose batch does not fit starts its share again alone, and the others wait for it. After the forward
pass of its last part, whose backward pass reduces the gradients, it raises instead. A model or loss that itself
exchanges values between the ranks would do so more often on that rank: it needs out_of_memory="raise".

The plan's levers are those of `flatout tune`, applied by the same functions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, Self, TypedDict

from flatout.arguments import as_function, as_loss_fn, as_model, as_optimizer, as_plan, check_optimizer_of
from flatout.data.nested import batch_length, split_batch
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.levers.activation_checkpointing import ActivationCheckpointing, caches_off, caching
from flatout.levers.applied import Applied
from flatout.levers.catalogue import levers_of
from flatout.levers.in_backward import UpdatesInBackward, check_in_backward
from flatout.levers.lever import choices_of_plan
from flatout.levers.low_bit import LowBitOptimizer
from flatout.levers.model_call import calls_wrapped
from flatout.levers.subject import Subject
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.parallel.heartbeat import heartbeat
from flatout.parallel.parallelize import let_go, parallelize
from flatout.parallel.whole_tensors import ELSEWHERE, home_of
from flatout.parameters import parameters_of
from flatout.plan import Plan
from flatout.precision.autocast import autocast_call, not_in_fp32
from flatout.precision.recurrent import lstm_gradients_right
from flatout.train.gradients import GradientStep, check_clip_norm, check_scalable, check_trained
from flatout.train.loss import CountTerms, LossFn, as_terms, own_metrics, terms_or_none
from flatout.train.loss_parts import LossParts, Number, as_figure, check_loss, detached, figures_of, scaled
from flatout.train.nonfinite import LossWatch, check_weights_finite
from flatout.train.placement import explain_batch
from flatout.train.ranks import MeanOverRanks, SharedStep, is_first, largest_of_ranks, raised_on_all_ranks
from flatout.train.schedulers import before_any_step, check_scheduler
from flatout.train.split import Attempt, Attempts, batch_coupled_layers, explain_part, release

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from flatout.parallel.heartbeat import Heartbeat
    from flatout.parallel.pipeline.training import Pipeline


class StepState(TypedDict):
    """What a TrainStep itself remembers."""

    steps: int
    skipped: int
    micro_batches: int
    split_samples: NotRequired[int | None]
    """Not in what earlier versions saved."""
    scaler: dict[str, object] | None


class TrainStep:
    """A callable training step.

    `loss_fn(model, batch)` returns the mean loss as a scalar tensor, or (loss, figures) with a dict of further scalars,
    which are then in `figures`. `count_terms(batch)` returns how many terms it is the mean of (default: `loss_fn`'s
    own, else the number of samples). `scheduler` is stepped once per call. Choices of the plan that cannot be applied
    here are in `rolled_back`, with the reason. The first loss that is inf or NaN causes a warning with its step's
    number, unless the plan says what to do with such steps (`nonfinite`, or fp16, which skips them).

    Raises UsageError if model, optimizer and loss do not belong together.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        plan: Plan | None = None,
        *,
        clip_norm: float | None = None,
        scheduler: LRScheduler | None = None,
        count_terms: CountTerms | None = None,
    ) -> None:
        self.plan = as_plan(plan, "step")
        check_clip_norm(clip_norm)
        let_go(as_model(model))
        _check_parts(model, optimizer, loss_fn, scheduler, count_terms)
        self.model, self.optimizer, self.loss_fn, self.scheduler = model, optimizer, loss_fn, scheduler
        self.steps = 0
        """Optimizer steps taken, including those that were skipped."""
        self.micro_batches = self.plan.micro_batches or 1
        """Parts that a batch is split into; more than in the plan once a batch did not fit."""
        self._split_samples: int | None = None
        """Batches of so many samples get all of these parts, smaller ones fewer; None: every batch gets them."""
        self._given_count_terms = count_terms
        self.count_terms: CountTerms = count_terms or getattr(loss_fn, "count_terms", None) or batch_length
        """count_terms(batch): the number of terms that its loss is the mean of; None if the loss is their sum."""
        self._subject = Subject(any_model=False)
        self._subject.modules.add(model)
        self._subject.optimizers.add(optimizer)
        self._applied = Applied(self._subject)
        self._levers = contextlib.ExitStack()
        self._strategy = parallelize(model, optimizer, self.plan)
        if self._strategy.wrapper or self._strategy.settled:
            # Innermost: what other levers wrap around a call is around this too.
            self._levers.enter_context(self._subject.around_calls(self._reduced))
        self.group: ProcessGroup | None = self._strategy.group
        """The ranks that train the model together, each on its share of every batch; None: this process alone."""
        self.together: ProcessGroup | None = self._strategy.together or self.group
        """The ranks that train the model together, on shares of a batch or on the same one; None: this process."""
        if self.plan.optimizer_in_backward:
            ranks = 1 if self.group is None else self.group.size()
            check_in_backward(optimizer, model, clip_norm=clip_norm, ranks=ranks)
        if self.plan.precision == "fp16":
            check_scalable(optimizer, name_of=functools.partial(_name_in, model))
        self._apply_levers()
        stepped: Any = optimizer  # a LowBitOptimizer takes its place without being a subclass
        if self.plan.optimizer_state is not None:
            stepped = LowBitOptimizer(optimizer)
            self._levers.callback(stepped.close)
        self._update = GradientStep(
            stepped,
            clip_norm=clip_norm,
            fp16=self.plan.precision == "fp16",
            nonfinite=self.plan.nonfinite,
            norm_of=self._strategy.total_norm,
            name_of=functools.partial(_name_in, model),  # no method of ours: its cycle would delay undoing
        )
        self._in_backward: UpdatesInBackward | None = None
        if self.plan.optimizer_in_backward:
            self._in_backward = UpdatesInBackward(stepped)
            self._in_backward.pause()
            self._levers.callback(self._in_backward.close)
        self.figures: dict[str, Tensor] = {}
        """What loss_fn returned besides the loss of the last step: means over the batch, tensors on the device."""
        self._losses: LossWatch | None = None
        if self.plan.nonfinite is None and self.plan.precision != "fp16":
            self._losses = LossWatch()
        self._heartbeat: Heartbeat | None = None
        self._begun = False
        self._loss_checked = False
        self._zero_grad = _zero_grad_of_torch(optimizer)
        self._attempts = Attempts(model)
        self._kept: Attempt | None = None
        """The buffers before the step, during a step that may be skipped."""
        self._mean_terms: MeanOverRanks | None = None
        """The mean over the ranks of the terms in a step's batch, once it is known."""
        self._shared: SharedStep | None = None
        self._watched = contextlib.ExitStack()
        self._watch_shared_step()
        self._closed = False

    # what the user calls

    def __call__(self, batch: object) -> Tensor:
        """One step on `batch`. Returns its mean loss before the step, a detached scalar on the model's device.

        With several ranks `batch` is this rank's share, and the mean over the ranks of the returned losses is the mean
        loss of the whole batch.
        """
        if not self.model.training or self._closed:
            raise self._no_training()
        if self.plan.nonfinite is not None:
            self._update.check(wait=False)
        if not self._begun:  # no earlier: a rank that has not trained is not seen to hang
            self._heartbeat, self._begun = heartbeat(), True
        if self._heartbeat is not None:
            self._heartbeat.write(self.steps, inside=True)
        if self._during_calls or self._caching:
            with self._settings():
                loss = self._updated(batch)
        else:
            loss = self._updated(batch)
        if self.scheduler is not None:
            with before_any_step() if not self.steps and self._update.may_skip else contextlib.nullcontext():
                self.scheduler.step()
        self.steps += 1
        if self._losses is not None:
            self._losses.add(self.steps, loss)
        if self._heartbeat is not None:
            self._heartbeat.write(self.steps, inside=False)
        return loss

    @property
    def device(self) -> torch.device:
        """Where the first parameter that it trains is computed with."""
        return home_of(self._update.parameters[0])

    @property
    def skipped(self) -> int:
        """Number of steps without an update, because a gradient was not finite. Waits for the device."""
        return self._update.skipped

    @property
    def gradient_norm(self) -> Tensor | None:
        """The last gradient's norm before clipping, a device tensor; None without clip_norm and `nonfinite`."""
        return self._update.norm

    @property
    def rolled_back(self) -> list[tuple[str, str]]:
        """Choices of the plan that could not be applied, or found nothing to act on, and why."""
        failed = [(entry.choice.label, entry.reason) for entry in self._applied.rolled_back]
        return failed + self._subject.incidents

    @property
    def nonfinite_losses(self) -> int:
        """Number of steps whose loss was inf or NaN; 0 with fp16 or `nonfinite`. Waits for the device."""
        if self._losses is None:
            return 0
        self._losses.look()
        return self._losses.count

    def finish(self) -> None:
        """Check the gradients and losses that were not read yet: raise or warn. Waits for the device."""
        self._update.check(wait=True)
        if self._losses is not None:
            self._losses.look()

    def check_finite(self) -> bool:
        """Raise NumericsError if a trained weight is inf or NaN. Waits for the device.

        Returns False if every loss since the last call was inf or NaN although the weights are finite.
        """
        self.finish()
        let_go(self.model)
        moved = {id(parameter) for parameter in self._update.parameters}
        trained = [
            (name, one)
            for name, one in self.model.named_parameters()
            if id(one) in moved and not getattr(one, ELSEWHERE, False)
        ]
        watch = self._losses or LossWatch()
        with raised_on_all_ranks(self.together if self._strategy.calls_are_collective else None, self.device):
            check_weights_finite(trained, watch)
        learnt = not watch.none_finite_since()
        watch.begin()
        return learnt

    def metrics(self, model: Module, batch: object) -> Mapping[str, object]:
        """The loss function's own metrics of a batch; without any, its loss, weighted by `count_terms`.

        `flatout.evaluate(step, data)` uses these. Pass them for another model, such as an average of the weights:
        `flatout.evaluate(average, data, step.metrics, plan=plan)`.
        """
        return own_metrics(self.loss_fn, self.count_terms, model, batch)

    def weight_of_loss(self, batch: object) -> Tensor | float:
        """How much the loss of the step on this batch, the last one taken, counts in a mean over steps: the terms that
        it is the mean of; 1 for a loss that sums, and for a batch whose samples cannot be counted.

        With several ranks it is the mean of the terms over the ranks, because each rank's loss is its part of the whole
        batch's mean already.
        """
        if self._mean_terms is not None:
            return self._mean_terms.mean
        terms = terms_or_none(self.count_terms, batch)
        return 1 if terms is None else terms

    def sections(self) -> dict[str, object]:
        """What a checkpoint of this training holds, by name, for `capture(step)` and `restore(..., step)`."""
        live = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self}
        return {name: one for name, one in live.items() if one is not None}

    def with_plan(self, plan: Plan) -> Self:
        """A step with the same objects and settings and another plan, which continues from here; this one is closed.

        step = step.with_plan(flatout.fit_to_memory("12 GiB", step, batch).plan)

        That of a subclass is of its class too, and has the attributes that it has added.
        """
        as_plan(plan, "step")
        self.finish()
        state = self.state_dict()
        self._undo(parts_stay=plan.parallel == self.plan.parallel)
        step = object.__new__(type(self))  # a subclass's constructor may take anything, and has done its part
        vars(step).update(vars(self))
        loss_fn, clip_norm, given = self.loss_fn, self._update.clip_norm, self._given_count_terms
        if inspect.ismethod(loss_fn) and loss_fn.__self__ is self:  # it reads what the step holds
            loss_fn = loss_fn.__func__.__get__(step)
        parts = self.model, self.optimizer, loss_fn, plan
        TrainStep.__init__(step, *parts, clip_norm=clip_norm, scheduler=self.scheduler, count_terms=given)
        # how far to split batches depends on the plan
        step.load_state_dict({**state, "micro_batches": 1, "split_samples": None})
        return step

    def for_copies(
        self, plan: Plan, model: Module, optimizer: Optimizer, loss_fn: LossFn, scheduler: LRScheduler | None = None
    ) -> TrainStep:
        """A step with the same settings for copies of its model, optimizer and loss."""
        clip_norm, given = self._update.clip_norm, self._given_count_terms
        return TrainStep(model, optimizer, loss_fn, plan, clip_norm=clip_norm, scheduler=scheduler, count_terms=given)

    def close(self) -> None:
        """Undo every lever: model and optimizer are as they were given, except for their training.

        A model that `parallel = "fsdp"` has sharded stays sharded; a step with the same plan continues with it. Under
        "zero1" each rank keeps the optimizer's state of its part: only `with_plan` passes it on to any other plan.
        """
        self._undo(parts_stay=True)

    def _undo(self, *, parts_stay: bool) -> None:
        """parts_stay: nothing is exchanged between the ranks."""
        self._closed = True
        self._applied.set([])
        self._watched.close()
        self._levers.close()
        if not parts_stay and self._strategy.gather_state is not None:
            self._strategy.gather_state()
        self._strategy.close()

    def state_dict(self) -> StepState:
        """What the step itself remembers: counts, loss scaling, parts. `capture(step)` includes all that it trains."""
        scaler = self._update.scaler.state_dict() if self._update.scaler is not None else None
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "micro_batches": self.micro_batches,
            "split_samples": self._split_samples,
            "scaler": scaler,
        }

    def load_state_dict(self, state: StepState) -> None:
        """Restore what `state_dict` returned."""
        self.steps, self.micro_batches = state["steps"], max(state["micro_batches"], self.plan.micro_batches or 1)
        self._split_samples = state.get("split_samples")
        self._update.set_skipped(state["skipped"])
        if self._update.scaler is not None and state["scaler"]:
            self._update.scaler.load_state_dict(state["scaler"])

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Raises UsageError: its levers act on its own model and optimizer, in this process."""
        raise UsageError(
            "a TrainStep cannot be copied or pickled",
            limit="it acts on its own model and optimizer, in this process",
            remedy="copy those and make another from the copies; flatout.capture(step) is for saving",
        )

    # inside

    def _no_training(self) -> UsageError:
        if self._closed:
            limit, remedy = "its plan is not in force any more", "make a new TrainStep, or use the one of with_plan"
            return UsageError("this step is closed", limit=limit, remedy=remedy)
        return UsageError("the model is in evaluation mode", limit="a step trains", remedy="call model.train() first")

    def _apply_levers(self) -> None:
        wanted = self.plan.part_for("step").choices()
        for whole_step in ("optimizer_in_backward", "optimizer_state"):  # their levers are for a script's own loop
            wanted.pop(whole_step, None)
        if wanted.get("precision") == "fp16":
            if nothing := not_in_fp32(self.model):
                self._subject.note_incident("fp16 autocast", nothing)
            # Without the lever, which scales each backward pass: here the whole step is scaled, and the scale is saved.
            del wanted["precision"]
            self._levers.enter_context(self._subject.around_calls(autocast_call("fp16")))
            self._levers.enter_context(lstm_gradients_right())
        checkpointing = ActivationCheckpointing(self.plan.checkpointed_blocks)
        levers = [checkpointing if isinstance(one, ActivationCheckpointing) else one for one in levers_of("step")]
        choices = choices_of_plan(wanted, levers)
        self._during_calls = [one for one in choices if one.lever.cheap_to_switch]
        self._applied.set([one for one in choices if one not in self._during_calls])
        self._caching = caching(self.model) if self.plan.activation_checkpointing is not None else []

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(caches_off(self._caching))
            for choice in self._during_calls:
                stack.enter_context(choice.lever.apply(self._subject, choice.value))
            yield

    def _updated(self, batch: object) -> Tensor:
        if self._in_backward is not None:
            self._in_backward.follow()
            try:
                return self._backward_in_parts(batch)
            finally:
                self._in_backward.pause()
        loss = self._backward_in_parts(batch)
        attempt, self._kept = self._kept, None
        self._update.take(self.steps + 1, attempt)
        return loss

    def _backward_in_parts(self, batch: object) -> Tensor:
        """Gradients of the whole batch's mean loss; tried again with smaller parts if memory runs out."""
        self._mean_terms = None
        if self._strategy.before_step is not None:
            self._strategy.before_step(batch)
        if self._shared is not None:
            self._shared.begin()
        if self._strategy.settled is not None and self._loss_checked:
            self._settle()
        was_split = False
        while True:
            attempt = self._attempt()
            self._free_gradients()
            try:
                if self.micro_batches == 1 and self._strategy.is_alone:
                    loss = self._backward_whole(batch)
                else:
                    loss = self._backward(split_batch(batch, self._parts(batch)))
            except Exception as error:
                if not is_out_of_memory(error):
                    if isinstance(error, RuntimeError | TypeError):  # of devices or dtypes that do not match
                        explain_batch(self.model, batch, error)
                    if self.micro_batches > 1 and not isinstance(error, FlatoutError):
                        explain_part(error, self.model, batch_length(batch), self._parts(batch), split_here=was_split)
                    raise
                self._refuse_to_split(error, batch)
            else:
                if attempt is not None:
                    self._attempts.succeeded(attempt)
                self._kept = attempt if self._update.may_skip else None
                return loss
            # Only outside of the handler does nothing hold the tensors of the failed attempt any more.
            if attempt is not None:
                attempt.check_restorable()
                # DDP has replaced the buffers of the other ranks by the first one's, which it does once a step.
                attempt.put_back(buffers=self._shared is None or is_first(self.group))
            if self._shared is not None and self._strategy.ddp is not None:
                self._shared.begin_again(self._strategy.ddp)
            release(self.model, self.optimizer)
            self._split_further(batch)
            was_split = True

    def _free_gradients(self) -> None:
        """`zero_grad(set_to_none=True)`. Torch's own is not called: what it does besides, for its profiler and its
        compiler, takes up to a tenth of a short step."""
        import torch

        if self._zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(self.optimizer):
            for parameter in parameters_of(self.optimizer):
                parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def _attempt(self) -> Attempt | None:
        may_skip = self._update.may_skip  # then they are put back, whether or not it is tried again
        if self._in_backward is not None or (self.plan.out_of_memory == "raise" and not may_skip):
            return None
        exact = self.plan.out_of_memory == "exact" and not may_skip
        if exact and not self._attempts.are_known and batch_coupled_layers(self.model):
            self._attempts.copy_none()
        return self._attempts.begin()

    def _backward_whole(self, batch: object) -> Tensor:
        """`_backward` of a single part in a single process: where steps are short, the rest of it takes time."""
        loss, figures = self._loss(batch)
        self._update.scale(loss).backward()
        self.figures = {name: as_figure(value) for name, value in figures.items()}
        return detached(loss)

    def _backward(self, parts: Sequence[object]) -> Tensor:
        weights, total = self._weights(parts)
        sums = LossParts(weights, total)
        if self._strategy.pipeline is not None:
            return self._in_stages(self._strategy.pipeline, parts, sums)
        # gradients are averaged over the ranks: of a loss that sums over its terms that is a part of the sum
        ranks = 1 if self.group is None or total is not None else self.group.size()
        further = self._passes_of_others(len(parts))
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            # even without terms: the last one reduces the ranks' gradients
            needs_all_ranks = self._strategy.calls_are_collective or (last and self.group is not None)
            if not needs_all_ranks and sums.is_left_out(i):
                continue
            with contextlib.nullcontext() if last else self._without_reduction():
                returned = self._loss(part)
                if self._mean_terms is not None:
                    self._mean_terms.wait()
                share = sums.share(i, part, returned)
                self._update.scale(share if ranks == 1 else share * ranks).backward()
        for _ in range(further):
            scaled(self._loss(parts[-1])[0], 0.0).backward()
        if self._strategy.after_backward is not None:
            self._strategy.after_backward()
        self.figures = sums.figures
        assert sums.loss is not None  # a part is only left out if others have terms
        return sums.loss if ranks == 1 else sums.loss * ranks

    def _parts(self, batch: object) -> int:
        pipeline = self._strategy.pipeline
        if pipeline is not None:
            return pipeline.parts(batch_length(batch), self.micro_batches)
        if self._split_samples is None:
            return self.micro_batches
        # As large as those that fit: an epoch's last batch would get parts of one sample, on which batch norm fails.
        parts = -(-self.micro_batches * batch_length(batch) // self._split_samples)
        return min(self.micro_batches, max(parts, self.plan.micro_batches or 1))

    def _in_stages(self, pipeline: Pipeline, parts: Sequence[object], sums: LossParts) -> Tensor:
        """The same with a model whose blocks are on several ranks: only the last one has a loss."""
        import torch

        self._update.scale(torch.zeros((), device=self.device))  # so that every rank's scaler has a scale

        def forward(part: object) -> object:  # in the precision of the step, which levers leave alone without gradients
            with torch.no_grad(), calls_wrapped(self.model, self._subject.wrapped):
                return self.loss_fn(self.model, part)

        pipeline.run(parts, lambda i: self._update.scale(sums.share(i, parts[i], self._loss(parts[i]))), forward)
        if self._strategy.after_backward is not None:
            self._strategy.after_backward()
        loss, self.figures = pipeline.of_last_stage(sums.loss, sums.figures)
        return loss

    def _weights(self, parts: Sequence[object]) -> tuple[Sequence[Number | None], Number | None]:
        """How many terms each part's mean has, and their sum; no sum if the parts are to be added up as they are.

        With several ranks, over which gradients are averaged, it is the mean of the ranks' sums: each term then has the
        same weight, whichever rank has it, in however many parts.
        """
        if len(parts) == 1 and self.group is None:
            return [1], None
        weights = [as_terms(self.count_terms(part)) for part in parts]
        terms = [weight for weight in weights if weight is not None]
        if len(terms) < len(weights):
            return weights, None  # the loss sums over its terms
        if self.group is None:
            return weights, sum(terms)
        if self._mean_terms is None:  # once a step, however often this rank starts its share of it again
            self._mean_terms = MeanOverRanks(sum(terms), self.device, self.group)
        if len(parts) > 1:  # a part without terms is left out, which is decided before its forward pass
            self._mean_terms.wait()
        return weights, self._mean_terms.mean

    def _passes_of_others(self, parts: int) -> int:
        """How many more parts than here the rank whose share has the most of them has: this one takes part in their
        passes with a loss of 0. Known before the first pass, as another collective cannot come between those."""
        if self.group is None or not self._strategy.calls_are_collective or self.micro_batches == 1:
            return 0
        return largest_of_ranks(parts, self.device, self.group) - parts

    def _settle(self) -> None:
        """Go on in the way that the first step has shown to be the better one."""
        settled = self._strategy.settled
        assert settled is not None
        self.optimizer.zero_grad(set_to_none=True)
        strategy = settled()
        self._levers.callback(strategy.close)
        strategy.settled, strategy.close = None, self._strategy.close
        strategy.gather_state = self._strategy.gather_state
        self._strategy = strategy
        self._watch_shared_step()

    def _watch_shared_step(self) -> None:
        """Follow which of a step's collectives are over."""
        self._watched.close()
        if self.group is not None and self._strategy.ddp is not None:
            self._shared = SharedStep()
            self._watched.enter_context(self._shared.watching(self._strategy.ddp))

    def _reduced(self, module: Module, call: Callable[[], object]) -> object:
        """A call of the model as its ranks make it."""
        wrapper = self._strategy.wrapper
        return call() if wrapper is None else wrapper(module, call)

    def _loss(self, part: object) -> tuple[Tensor, dict[str, Number]]:
        if self._strategy.before_loss is not None:
            self._strategy.before_loss()
        if not self._subject.wrappers:
            returned, called = self.loss_fn(self.model, part), True
        else:
            with calls_wrapped(self.model, self._subject.call) as calls:
                returned = self.loss_fn(self.model, part)
            called = bool(calls)
        if self._strategy.after_loss is not None:
            self._strategy.after_loss()
        loss, figures = figures_of(returned)
        if not self._loss_checked:
            check_loss(loss)
            if not called:
                raise UsageError(
                    "loss_fn never called the model that it was given",
                    limit="what the plan chooses acts on that call",
                    remedy="call model(...) in loss_fn, not one of its parts",
                )
            self._loss_checked = True
        return loss, figures

    def _without_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Under DDP gradients are averaged over the ranks once per step, not once per part."""
        no_sync: Callable[[], contextlib.AbstractContextManager[None]] | None = getattr(self.model, "no_sync", None)
        return self._strategy.without_reduction() if no_sync is None else no_sync()

    # out of memory

    def _refuse_to_split(self, error: Exception, batch: object) -> None:
        """Raise if splitting is not wanted, not exact, or not possible any more."""
        if self.plan.out_of_memory == "raise" or self._in_backward is not None:
            raise error  # weights that were updated in this backward cannot be restored
        if self.group is not None or self._strategy.calls_are_collective or hasattr(self.model, "no_sync"):
            self._refuse_to_split_alone(error)
        if self.plan.out_of_memory == "exact" and (coupled := batch_coupled_layers(self.model)):
            raise MachineError(
                f"a batch does not fit, and {coupled[0]} mixes the samples of a batch",
                limit="out_of_memory = 'exact' splits only where the gradients stay the same",
                remedy="use a smaller batch, or out_of_memory = 'split'",
            ) from error
        remedy = "activation_checkpointing, a smaller precision, or a smaller model"
        try:
            samples = batch_length(batch)
            split_batch(batch, 2)
        except UsageError as unclear:
            raise MachineError(
                f"a batch does not fit into the memory of {self.device}",
                limit=f"it cannot be split: {unclear.what}",
                remedy=f"use a smaller batch, {remedy}",
            ) from error
        if self._parts(batch) >= samples:
            raise MachineError(
                f"a single sample of this batch does not fit into the memory of {self.device}",
                limit="a batch cannot be split further",
                remedy=f"use {remedy}",
            ) from error

    def _refuse_to_split_alone(self, error: Exception) -> None:
        """Raise if the other ranks are in a collective that this one left, or would have to take part again."""
        obstacle = None if self._strategy.alone_before_step else "it is not a rank of DDP"
        if self._shared is not None and self._strategy.ddp is not None:
            obstacle = self._shared.obstacle(self._strategy.ddp)
        elif self._strategy.calls_are_collective:
            obstacle = "each pass exchanges tensors with the other ranks"
        if obstacle is not None:
            later = "" if self._strategy.calls_are_collective else ": parts before the last can be tried again"
            raise MachineError(
                "out of memory on one rank",
                limit=f"it cannot start its share of a step again alone: {obstacle}",
                remedy=f"use a smaller batch or a larger micro_batches{later}",
            ) from error

    def _split_further(self, batch: object) -> None:
        samples = batch_length(batch)
        parts = self._parts(batch)
        if parts == self.micro_batches:
            self.micro_batches, self._split_samples = min(samples, parts * 2), samples
        else:  # these samples are larger than those before
            self._split_samples = max(1, self.micro_batches * samples // (2 * parts))
        coupled = batch_coupled_layers(self.model)
        note = f" (not exact: {coupled[0]} mixes the samples of a batch)" if coupled else ""
        warnings.warn(
            f"a batch of {samples} did not fit; from now on it is split into {self._parts(batch)} parts{note}",
            stacklevel=4,
        )


def _check_parts(model: Module, optimizer: Optimizer, loss_fn: object, scheduler: object, count_terms: object) -> None:
    """UsageError for what is of another kind, and for parts that do not belong together."""
    _check_optimizer(as_optimizer(optimizer))
    check_trained(optimizer)
    check_optimizer_of(optimizer, model)
    check_scheduler(scheduler, optimizer)
    as_loss_fn(loss_fn)
    if count_terms is not None:
        limit = "it is called as count_terms(batch) and returns how many terms the loss is the mean of"
        as_function(count_terms, "count_terms", 1, limit=limit)


def _check_optimizer(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}",
            limit="it evaluates the loss several times per step, which TrainStep does not do",
            remedy="call its step(closure) in your own loop, or use SGD or AdamW",
        )


def _zero_grad_of_torch(optimizer: Optimizer) -> object:
    """The `zero_grad` that this optimizer inherits, where that is torch's own and no patch of it; else None."""
    import torch

    found = torch.optim.Optimizer.zero_grad
    own = getattr(found, "__code__", None) is not None and found.__code__.co_filename.startswith(torch.__path__[0])
    return found if own and getattr(type(optimizer), "zero_grad", None) is found else None


def _name_in(model: Module, parameter: Tensor) -> str:
    return next((name for name, one in model.named_parameters() if one is parameter), "")
