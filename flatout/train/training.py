"""One training as one value: what forecasts, searches and real tries are all asked about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
        _check_plan(plan)
        _check_objects(model, optimizer, loss_fn)
        samples = _samples_of(batch)
        return cls(model=model, optimizer=optimizer, loss_fn=loss_fn, batch=batch, plan=plan or Plan(), samples=samples)

    def under(self, plan: Plan) -> Training:
        return replace(self, plan=plan)

    @property
    def device_type(self) -> str:
        """Where the model is: 'cpu' or 'cuda'."""
        return next((one.device.type for one in self.model.parameters()), "cpu")


def check_batch_size(batch_size: Any) -> None:
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise UsageError(f"batch_size is {batch_size!r}", limit="it must be a whole number of at least 1")


def _check_plan(plan: Any) -> None:
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(
            f"plan is {plan!r}", limit="it is a flatout.Plan or None", remedy="for example Plan(precision='bf16')"
        )


def _check_objects(model: Any, optimizer: Any, loss_fn: Any) -> None:
    from torch.nn.modules.loss import _Loss

    if not hasattr(model, "named_parameters") or not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"got {type(model).__name__} as the model and {type(optimizer).__name__} as the optimizer",
            limit="they are a torch.nn.Module and a torch.optim.Optimizer, in this order",
        )
    if not callable(loss_fn) or isinstance(loss_fn, _Loss):
        raise UsageError(
            f"loss_fn is {loss_fn!r}",
            limit="it is called as loss_fn(model, batch) and returns the mean loss",
            remedy="for (inputs, targets): flatout.supervised(torch.nn.CrossEntropyLoss())",
        )


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
