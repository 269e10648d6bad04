"""The loss of a batch from the losses of its parts, each weighted by the number of terms in its mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from flatout.arguments import described
from flatout.data.nested import batch_length
from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Number: TypeAlias = "Tensor | float"
"""A scalar tensor, or a number on the host."""


class LossParts:
    """`weights`: how many terms each part has; `total`: what they are divided by, None if parts are just added up.

    A part without terms adds nothing, even where its mean is NaN. A batch without any terms has the mean of its parts'
    means, with the gradient that they have: for torch's criteria NaN, and zero gradients.
    """

    def __init__(self, weights: Sequence[Number | None], total: Number | None) -> None:
        self._weights, self._total = weights, total
        self.loss: Tensor | None = None
        """Of the parts so far, detached."""
        self.figures: dict[str, Tensor] = {}
        self._samples = 0

    def is_left_out(self, i: int) -> bool:
        """Does part i have no terms while others have some, as far as is known without waiting for the device?"""
        return self._is_known(i) and bool(self._total) and not self._weights[i]

    def share(self, i: int, part: object, returned: tuple[Tensor, Mapping[str, Number]]) -> Tensor:
        """What part i adds to the batch's loss, to call backward on; `returned` is (loss, figures)."""
        loss, figures = returned
        scale = None if self._total is None else self._scale(i)
        share = loss if scale is None else scaled(loss, scale)
        self.loss = detached(share) if self.loss is None else self.loss + share.detach()
        if figures:
            self._add(figures, scale, part)
        return share

    def _is_known(self, i: int) -> bool:
        weight = self._weights[i]
        return self._total is not None and weight is not None and on_host(weight) and on_host(self._total)

    def _scale(self, i: int) -> Number:
        """Part i's share of the batch's terms; equal shares if the batch has none."""
        equal = 1.0 / len(self._weights)
        weight = self._weights[i]
        assert weight is not None
        if self._is_known(i):
            return float(weight) / float(self._total) if self._total else equal
        import torch

        total = torch.as_tensor(self._total)
        return torch.where(total == 0, equal, weight / torch.where(total == 0, 1, total))

    def _add(self, figures: Mapping[str, Number], scale: Number | None, part: object) -> None:
        if scale is None:  # with a loss that sums, figures are weighted by the samples
            samples = batch_length(part) if len(self._weights) > 1 else 1
            before, self._samples = self._samples, self._samples + samples
            self.figures = {name: value * (before / self._samples) for name, value in self.figures.items()}
            scale = samples / self._samples
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + scaled(as_figure(value), scale)


def on_host(value: Number) -> bool:
    """Can this number be read without waiting for a device? A fake tensor has no value to read."""
    if isinstance(value, int | float):
        return True
    from flatout.memory.fake_run import is_fake

    return value.device.type == "cpu" and not is_fake(value)


def figures_of(returned: Tensor | tuple[Tensor, Mapping[str, Number]]) -> tuple[Tensor, dict[str, Number]]:
    """(loss, figures) of what a loss function returned: a loss, or both. UsageError for figures that are no scalars."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        return returned, {}
    if "loss" in returned[1]:
        raise UsageError(
            "loss_fn returned a figure named 'loss'",
            limit="that is the name of the loss itself",
            remedy="give it another name, such as 'ce_loss'",
        )
    for name, value in returned[1].items():
        if isinstance(value, int | float):
            continue
        if not hasattr(value, "numel") or value.numel() != 1 or value.is_complex():
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise UsageError(
                f"loss_fn returned {described(value)}{shape} as the figure {name!r}",
                limit="a figure besides the loss is a number or a scalar tensor, a mean over the batch",
                remedy="take its mean",
            )
    return returned[0], dict(returned[1])


def check_loss(loss: object) -> None:
    """UsageError for what no backward pass can start from."""
    import torch

    if not isinstance(loss, torch.Tensor):
        remedy = "return its .loss" if isinstance(getattr(loss, "loss", None), torch.Tensor) else ""
        what = f"loss_fn returned {type(loss).__name__}"
        raise UsageError(what, limit="it returns the mean loss, a scalar tensor", remedy=remedy)
    if loss.is_complex():
        raise UsageError(
            f"loss_fn returned a tensor of {loss.dtype}",
            limit="it returns the mean loss, a real number: of complex ones none is the lowest",
            remedy="return a real one, such as output.abs().square().mean()",
        )
    if loss.numel() != 1:
        raise UsageError(
            f"loss_fn returned a tensor of shape {list(loss.shape)}",
            limit="it returns the mean loss, a scalar tensor",
            remedy="take its mean, or give the criterion reduction='mean'",
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not depend on any trained parameter",
            limit="backward needs a loss with a gradient",
            remedy="check loss_fn for detach(), .item() or torch.no_grad(), and the model for frozen parameters",
        )


def as_figure(value: Number) -> Tensor:
    """A detached tensor without dimensions, with memory of its own: one may be a parameter, which the step changes."""
    import torch

    return value.detach().squeeze().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def detached(loss: Tensor) -> Tensor:
    """A loss to keep beyond its step. `mse_loss` and others of torch's return a number in the memory of all that they
    have averaged, as large as the model's output; then it is a copy."""
    import torch

    kept = loss.detach()
    if type(kept) is torch.Tensor and kept.untyped_storage().nbytes() > kept.element_size():
        return kept.clone()
    return kept


def scaled(value: Tensor, scale: Number) -> Tensor:
    """`value * scale`, but 0 for a share of 0: the mean of nothing may be NaN."""
    import torch

    if isinstance(scale, float):
        return value * scale if scale else torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0.0)
    return torch.where(scale == 0, 0.0, value * scale)
