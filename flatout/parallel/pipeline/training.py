"""What a training step has to know of a model whose blocks are on several ranks: how a batch goes through them.

The parts of a batch follow each other through the stages, one forward and one backward pass at a time (1F1B, by
torch.distributed.pipelining). The user's loss function runs on every rank, around the model's own forward: on the last
stage it computes the loss, on the others it ends where their blocks do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any  # Any: the user's forward

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from flatout.buffers import buffers_of, found_buffers
from flatout.data.nested import map_tensors, tensors_in
from flatout.errors import PlanError, UsageError
from flatout.memory.fake_run import is_fake
from flatout.parallel.averaging import same_on_all_ranks
from flatout.parallel.collected_state import sent
from flatout.parallel.pipeline.balance import split_evenly
from flatout.parallel.pipeline.chain import Chain, Seen
from flatout.parallel.pipeline.ownership import Ownership, OwnState
from flatout.parallel.pipeline.work import Work
from flatout.parallel.strategy import Strategy, group_or_none
from flatout.parallel.tensor.parts import Across
from flatout.parallel.tensor.random import OwnStream, same_random_states
from flatout.parallel.tensor.training import SameBatch, overflow_on_all
from flatout.parallel.whole_tensors import STAGES
from flatout.parameters import parameters_of
from flatout.torch_private.modules import BatchNorm
from flatout.torch_private.ranks import as_voted

if TYPE_CHECKING:
    from flatout.plan import Plan

TIMES = 3
"""Forward passes that are timed, after one that is not."""
HELD_OF_PARAMETERS = 4
"""How often a stage holds the bytes of its parameters: with gradients, and two moments of an optimizer."""


def in_stages(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Strategy:
    """Put the model's blocks on the ranks in its first step, from rank 0's weights; one that is so goes on as it is.

    Raises PlanError for fewer micro_batches than ranks, or a compiled model; UsageError for one whose blocks are no
    chain.
    """
    group = group_or_none(distributed.group.WORLD)
    if group is None:
        return Strategy()
    ranks = group.size()
    micro_batches = plan.micro_batches or 1
    if micro_batches < ranks:
        raise PlanError(
            f"micro_batches is {micro_batches}, parallel is 'pipeline', and there are {ranks} ranks",
            limit="there is a part of the batch on each stage",
            remedy=f"set micro_batches to {ranks} or more: with {4 * ranks}, stages wait a fifth of the time",
        )
    if plan.compile not in (None, "regional"):
        raise PlanError(
            f"compile is {plan.compile!r}, and parallel is 'pipeline'",
            limit="a stage leaves the model's forward where its blocks end",
            remedy="set compile = 'regional', which compiles each block",
        )
    stages: Stages | None = model.__dict__.get(STAGES)
    if stages is None:
        norm = next((name for name, one in model.named_modules() if isinstance(one, BatchNorm)), None)
        if norm is not None:
            raise UsageError(
                f"{norm} is a batch norm, and parallel is 'pipeline'",
                limit="its statistics would be those of each part of a batch",
                remedy="use GroupNorm or LayerNorm, or parallel = 'ddp'",
            )
        stages = model.__dict__[STAGES] = Stages(model, Across(group))
        same_on_all_ranks(model)
    pipeline = Pipeline(model, optimizer, stages, fp16=plan.precision == "fp16")
    return Strategy(
        together=group,
        calls_are_collective=True,
        before_step=pipeline.begin,
        after_backward=pipeline.after_backward,
        total_norm=pipeline.norm,
        pipeline=pipeline,
    )


class Stages:
    """How the blocks of a model are shared by the ranks."""

    def __init__(self, model: nn.Module, across: Across) -> None:
        self.across = across
        self.chain = Chain(model)
        blocks = len(self.chain.blocks)
        split_evenly([1.0] * blocks, [1] * blocks, before=0.0, after=0.0, stages=across.count)  # refuses
        self.begins: list[int] = []
        """The first block of each stage, and the number of blocks; empty before the first step."""
        self.in_step = False

    def place(self, model: nn.Module, forward: Callable[[], object]) -> Ownership:
        """Measure `forward`, and give each rank its blocks. A collective."""
        blocks = self.chain.blocks
        buffers = found_buffers(buffers_of(model))
        try:
            every = self._observed(forward)
            kept = self.chain.kept_bytes(forward)
        finally:
            changed = [one for one in buffers if one.put_back()]
        inside = {id(module) for block in blocks for module in block.modules()}
        if outside := [one for one in changed if id(one.layer) not in inside]:
            path = next(path for path, module in model.named_modules() if module is outside[0].layer)
            name = f"{path}.{outside[0].name}".lstrip(".")
            raise UsageError(
                f"a forward pass changes {name}, which is outside of the repeated blocks, and parallel is 'pipeline'",
                limit="what is around the blocks is computed by some of the ranks, and each would have other values",
                remedy="move it into the blocks, or use parallel = 'ddp'",
            )
        if self.across.rank == 0:
            seconds = [min(one.seconds[i] for one in every) for i in range(len(blocks))]
            sizes = [HELD_OF_PARAMETERS * sum(one.nbytes for one in block.parameters()) for block in blocks]
            before, after = min(one.before_seconds for one in every), min(one.after_seconds for one in every)
            stages = self.across.count
            self.begins = split_evenly(seconds, sizes, kept=kept, before=before, after=after, stages=stages)
        self.begins = self.across.of_rank(0, self.begins)
        model.__dict__["forward"] = MethodType(_relayed, model)
        return Ownership(model, blocks, self.begins, self.across)

    def _observed(self, forward: Callable[[], object]) -> list[Seen]:
        first = next(self.chain.blocks[0].parameters(), None)
        if first is None or not is_fake(first):
            return [self.chain.observe(forward) for _ in range(1 + TIMES)][1:]
        with Work() as work:
            return [self.chain.observe(forward, lambda: work.done)]


def _relayed(model: nn.Module, *args: object, **kwargs: object) -> object:
    """The forward of a model in stages: outside of a step, one stage after the other, for all ranks together."""
    stages: Stages = model.__dict__[STAGES]
    plain = type(model).forward
    if stages.in_step:
        return plain(model, *args, **kwargs)
    across = stages.across

    def send(value: Tensor, rank: int) -> Tensor:
        shape, dtype = across.of_rank(rank, (value.shape, value.dtype))
        return sent(value if rank == across.rank else value.new_empty(shape, dtype=dtype), rank, across.group)

    with torch.no_grad():  # gradients do not cross ranks here
        output = stages.chain.relayed(lambda: plain(model, *args, **kwargs), stages.begins, across.rank, send)
        return map_tensors(lambda value: send(value, across.count - 1), output)


class _Stage(nn.Module):
    """What torch's schedule calls: this rank's blocks, of one part of the batch after the other."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, hidden: Tensor) -> Tensor:
        return self._run(hidden)


class Pipeline:
    """The steps of one model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stages: Stages, *, fp16: bool) -> None:
        self._model, self._optimizer, self._stages, self._fp16 = model, optimizer, stages, fp16
        self._across = stages.across
        self._device = next(model.parameters()).device
        self._stream = OwnStream(self._across)
        self._same_batch = SameBatch(self._across)
        self._own_state: OwnState | None = None
        self._schedules: dict[object, tuple[Schedule1F1B, Tensor]] = {}
        self._passed_on: Tensor | None = None
        """A tensor like those that stages pass on in the step that is under way."""
        self._share: Callable[[int], Tensor] | None = None
        self._next = 0
        """Number of the part whose forward pass is the next."""
        self._figures: list[str] | None = None
        """The names of what loss_fn returns besides the loss; None before the first step."""
        self._finite = True
        """Was the loss of the model as a whole finite, before it was split?"""
        self._trained: list[bool] = []
        """Of each parameter, when it was last seen that the first stage trains something."""

    def parts(self, samples: int, micro_batches: int) -> int:
        """In how many equal parts a batch goes through the stages: micro_batches, or the next number that divides it.

        Raises UsageError for fewer samples than stages.
        """
        if samples < self._across.count:
            raise UsageError(
                f"a batch has {samples} samples, and there are {self._across.count} ranks",
                limit="parallel = 'pipeline' has a part of the batch on each stage",
                remedy="use larger batches, and drop_last=True for a short last one",
            )
        return next(count for count in range(min(micro_batches, samples), samples + 1) if samples % count == 0)

    def begin(self, batch: object) -> None:
        self._same_batch.check(batch)
        same_random_states(self._device, self._across.group)

    def run(self, parts: Sequence[object], share: Callable[[int], Tensor], forward: Callable[[object], object]) -> None:
        """Forward and backward passes of a batch.

        share(i): on the last stage, part i's share of the loss; forward(part): the loss function, without gradients.
        """
        self._stages.in_step = True
        try:
            if self._own_state is None:
                self._place(lambda: forward(parts[0]))
            schedule, self._passed_on = self._schedule(parts, forward)
            self._check_first_stage_is_trained(share)
            self._share, self._next = share, 0
            self._stream.begin(self._device)
            count = len(parts)
            first = (torch.zeros(count, device=self._device),) if self._across.rank == 0 else ()
            target = torch.zeros(count) if self._across.rank == self._across.count - 1 else None
            schedule.step(*first, target=target, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # what loss_fn or a check here raised; torch's own words say nothing of it
        finally:
            self._share = self._passed_on = None
            self._stream.end()
            self._stages.in_step = False

    def after_backward(self) -> None:
        assert self._own_state is not None, "a step has run"
        first = self._ownership.after_backward(self._model)
        if first:
            self._own_state.drop()
        if self._fp16:
            overflow_on_all(parameters_of(self._optimizer), self._across)

    def norm(self, parameters: list[Tensor]) -> Tensor:
        """The norm of the whole gradient, on every rank."""
        updated = {id(one) for one in parameters}
        here = [one.grad for one in self._ownership.counted_here() if id(one) in updated and one.grad is not None]
        square = torch.nn.utils.get_total_norm(here).float().to(self._device).square()
        distributed.all_reduce(square, group=self._across.group)
        return square.sqrt()

    def of_last_stage(self, loss: Tensor | None, figures: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and figures of the last stage, on all ranks. Raises UsageError where the loss reads other stages."""
        last = self._across.count - 1
        source = distributed.get_global_rank(self._across.group, last)
        first = self._figures is None
        if self._figures is None:
            self._figures = self._across.of_rank(last, list(figures))
        values = torch.zeros(1 + len(self._figures), dtype=torch.float64, device=self._device)
        if self._across.rank == last:
            assert loss is not None, "the last stage has computed it"
            if list(figures) != self._figures:
                raise UsageError(
                    f"loss_fn returned the figures {list(figures)}, and {self._figures} before",
                    limit="parallel = 'pipeline' sends the same ones in each step",
                    remedy="return the same figures every time",
                )
            values = torch.stack([one.to(values) for one in (loss, *figures.values())])
        distributed.broadcast(values, source, group=self._across.group)
        found = values.float().unbind()
        if first and self._finite and not found[0].isfinite():
            raise UsageError(
                "the loss is not finite in stages, and was so in one piece",
                limit="the last stage has the model's output, and no more of what other stages computed",
                remedy="use the model's output alone in loss_fn, without hidden states; or parallel = 'fsdp'",
            )
        return found[0], dict(zip(self._figures, found[1:], strict=True))

    # inside

    def _place(self, forward: Callable[[], object]) -> None:
        known: Ownership | None = self._model.__dict__.get(_OWNERSHIP)
        if known is None:
            with torch.random.fork_rng(devices=self._cuda()):
                returned: list[object] = []
                known = self._stages.place(self._model, lambda: returned.append(forward()))
            self._model.__dict__[_OWNERSHIP] = known
            loss = returned[-1][0] if isinstance(returned[-1], tuple) else returned[-1]
            self._finite = isinstance(loss, Tensor) and not is_fake(loss) and bool(loss.isfinite().all())
        self._ownership = known
        kept = _OWN_STATES.get(self._optimizer)
        self._own_state = (kept and kept()) or OwnState(self._optimizer, self._across)
        _OWN_STATES[self._optimizer] = weakref.ref(self._own_state)
        self._own_state.drop()

    def _schedule(self, parts: Sequence[object], forward: Callable[[object], object]) -> tuple[Schedule1F1B, Tensor]:
        """torch's schedules are of one number of parts and one shape: there is one for each, with a tensor like those
        that its stages pass on."""
        key = (len(parts), tuple((path, tuple(one.shape)) for path, one in tensors_in(parts[0], "")))
        if key not in self._schedules:
            rank, last = self._across.rank, self._across.count - 1
            shape, dtype = self._hidden(lambda: forward(parts[0]))
            hidden = torch.empty(shape, dtype=dtype, device=self._device, requires_grad=True)
            stage = PipelineStage(
                _Stage(self._run_part),
                rank,
                last + 1,
                self._device,
                input_args=(hidden if rank else torch.empty(1, device=self._device),),
                output_args=(hidden if rank < last else torch.empty((), device=self._device, requires_grad=True),),
                group=self._across.group,
            )
            schedule = Schedule1F1B(stage, len(parts), loss_fn=lambda loss, _: loss, scale_grads=False)
            if is_fake(hidden):
                as_voted(schedule)
            self._schedules[key] = schedule, hidden
        return self._schedules[key]

    def _hidden(self, forward: Callable[[], Any]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what stages pass on: the first one tries it. A collective."""
        found: tuple[tuple[int, ...], torch.dtype] | None = None
        if self._across.rank == 0:
            buffers = found_buffers(buffers_of(self._model))
            try:
                with torch.random.fork_rng(devices=self._cuda()), torch.no_grad():
                    hidden = self._stages.chain.stage(forward, 0, self._stages.begins[1], None)
            finally:
                for one in buffers:
                    one.put_back()
            found = tuple(hidden.shape), hidden.dtype
        known = self._across.of_rank(0, found)
        assert known is not None, "the first rank has tried it"
        return known

    def _check_first_stage_is_trained(self, share: Callable[[int], Tensor]) -> None:
        """UsageError on every rank where it is not: the first one alone would see it, and the others wait for it. The
        later ones send back the gradient of what they were passed. A collective after a parameter was frozen."""
        trained = [one.requires_grad for one in self._model.parameters()]
        if trained == self._trained:
            return
        found = True
        if self._across.rank == 0 and not all(trained):
            buffers = found_buffers(buffers_of(self._model))
            begin = self._stages.begins[1]
            try:
                with torch.random.fork_rng(devices=self._cuda()), torch.enable_grad():
                    found = self._stages.chain.stage(lambda: share(0), 0, begin, None).requires_grad
            except Exception:  # the user's own code: the step that follows raises it where it is explained
                found = True
            finally:
                for one in buffers:
                    one.put_back()
        if not self._across.of_rank(0, found):
            raise self._untrained(0)
        self._trained = trained

    def _untrained(self, rank: int) -> UsageError:
        return UsageError(
            f"nothing on rank {rank} is trained, up to block {self._stages.begins[rank + 1]}",
            limit="parallel = 'pipeline' sends gradients through every stage",
            remedy="freeze fewer blocks, use fewer ranks, or parallel = 'fsdp'",
        )

    def _run_part(self, hidden: Tensor) -> Tensor:
        share, begins, rank = self._share, self._stages.begins, self._across.rank
        assert share is not None, "a step is under way"
        assert self._passed_on is not None, "its schedule is known"
        received, number = hidden if rank else None, self._next
        self._next += 1
        out = self._stages.chain.stage(lambda: share(number), begins[rank], begins[rank + 1], received)
        if not out.requires_grad:
            raise self._untrained(rank)
        if rank < self._across.count - 1:
            _check_passed_on(out, self._passed_on)
        return out.contiguous()

    def _cuda(self) -> list[torch.device]:
        return [self._device] if self._device.type == "cuda" else []


def _check_passed_on(out: Tensor, expected: Tensor) -> None:
    """The next stage would read its bytes as those of another shape or dtype, without an error where they are fewer."""
    if (out.shape, out.dtype) != (expected.shape, expected.dtype):
        found, before = (f"shape {list(one.shape)} and dtype {str(one.dtype)[6:]}" for one in (out, expected))
        raise UsageError(
            f"a part of a batch is passed on between stages with {found}",
            limit=f"parts of equal shapes were passed on with {before} before",
            remedy="let the model's shapes follow from those of the batch, not from its values; or parallel = 'fsdp'",
        )


_OWNERSHIP = "ownership_of_parameters"
_OWN_STATES: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OwnState]] = weakref.WeakKeyDictionary()
"""Of optimizers whose hooks are there already; these hold the values, which hold their optimizer."""
