"""How one model is trained by several ranks, as far as a training step has to know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from flatout.levers.subject import Wrapper
    from flatout.parallel.pipeline.training import Pipeline


@dataclass(kw_only=True)
class Strategy:
    """Of a process that trains alone, nothing is set."""

    group: ProcessGroup | None = None
    """Over whose ranks gradients are averaged; None: there are no others."""
    together: ProcessGroup | None = None
    """The ranks that compute one model on the same batch, with nothing to average; None: there are no others."""
    wrapper: Wrapper | None = None
    """What goes around the model's calls while it trains."""
    ddp: DistributedDataParallel | None = None
    """Where gradients are averaged by DDP, which has a state from one pass to the next."""
    calls_are_collective: bool = False
    """Do all ranks have to call the model equally often, because each call gathers its parameters?"""
    without_reduction: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around the forward and backward pass of a part of a batch that is not its last."""
    before_loss: Callable[[], None] | None = None
    """Called before the loss of a part is computed, which may be tried again."""
    after_loss: Callable[[], None] | None = None
    """Called when the loss of a part is there, before its backward pass."""
    before_step: Callable[[object], None] | None = None
    """Called with each step's batch, before its first pass."""
    after_backward: Callable[[], None] | None = None
    """Called when the gradients of a whole step are there, before anything uses them."""
    total_norm: Callable[[list[Tensor]], Tensor] | None = None
    """Of parameters, the norm of their gradients over all ranks, where a rank has a part of them without a DTensor."""
    pipeline: Pipeline | None = None
    """Takes the parts of a batch through the stages, in place of forward and backward passes of the whole model."""
    alone_before_step: bool = False
    """Are gradients only exchanged in `after_backward`, so that a rank may start its share again until then?"""
    gather_state: Callable[[], None] | None = None
    """Give each rank the optimizer's whole state, of which it has a part; a collective. None: it has all of it."""
    settled: Callable[[], Strategy] | None = None
    """What to go on with after the first step, whose passes showed more of the model; a collective. None: the same."""
    close: Callable[[], None] = lambda: None
    """Undo what can be undone: a model that is sharded stays sharded."""

    @property
    def is_alone(self) -> bool:
        """Does this process compute all of a step itself, with nothing to exchange?"""
        exchanges = self.calls_are_collective or self.after_backward is not None
        return self.group is None and self.pipeline is None and not exchanges


def group_or_none(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group, if it has more than one rank."""
    return group if group is not None and group.size() > 1 else None
