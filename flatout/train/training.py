"""One training as one value: what forecasts, searches and real tries are all asked about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flatout.arguments import as_loss_fn, as_model, as_optimizer, as_plan, as_whole_number, check_optimizer_of
from flatout.data.nested import batch_length
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.loss import LossFn


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer, the loss, a batch of the right kinds and shapes, and how it is to run."""

    model: Any
    optimizer: Any
    loss_fn: LossFn
    batch: Any
    plan: Plan
    samples: int
    """How many the batch has."""

    @classmethod
    def of(cls, model: Any, optimizer: Any, loss_fn: Any, batch: Any, plan: Plan | None) -> Training:
        """Checked: UsageError where one of them cannot be what it is given as."""
        plan = as_plan(plan, "step")
        as_model(model)
        as_optimizer(optimizer)
        check_optimizer_of(optimizer, model)
        as_loss_fn(loss_fn)
        samples = _samples_of(batch)
        return cls(model=model, optimizer=optimizer, loss_fn=loss_fn, batch=batch, plan=plan, samples=samples)

    def under(self, plan: Plan) -> Training:
        return replace(self, plan=plan)

    @property
    def device_type(self) -> str:
        """Where the model is: 'cpu' or 'cuda'."""
        return next((one.device.type for one in self.model.parameters()), "cpu")


def check_batch_size(batch_size: Any) -> None:
    if batch_size is not None:
        as_whole_number(batch_size, "batch_size")


def _samples_of(batch: Any) -> int:
    """How many samples an example batch has; at least one."""
    try:
        samples = batch_length(batch)
    except UsageError:
        raise
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
