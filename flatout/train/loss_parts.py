"""The loss of a batch from the losses of its parts, each weighed by how many terms its mean has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.arguments import described
from flatout.data.nested import batch_length
from flatout.errors import UsageError


class LossParts:
    """`weights`: how many terms each part has; `total`: what they are divided by, None where parts are just added up.

    A part without terms adds nothing, whatever its mean of nothing is. A batch without any has the mean of its parts'
    means, with the gradient that they give: for torch's criteria NaN, and zero gradients.
    """

    def __init__(self, weights: Sequence[Any], total: Any) -> None:
        self._weights, self._total = weights, total
        self.loss: Any = None
        """Of the parts so far, detached."""
        self.figures: dict[str, Any] = {}
        self._samples = 0

    def is_left_out(self, i: int) -> bool:
        """Has part i no terms while others have, as far as this is known without waiting for a device?"""
        return self._is_known(i) and bool(self._total) and not self._weights[i]

    def share(self, i: int, part: Any, returned: Any) -> Any:
        """What part i adds to the batch's loss, to call backward on; `returned` is (loss, figures)."""
        loss, figures = returned
        scale = None if self._total is None else self._scale(i)
        share = loss if scale is None else _scaled(loss, scale)
        self.loss = share.detach() if self.loss is None else self.loss + share.detach()
        if figures:
            self._add(figures, scale, part)
        return share

    def _is_known(self, i: int) -> bool:
        both = (self._weights[i], self._total)
        return self._total is not None and all(map(on_host, both))

    def _scale(self, i: int) -> Any:
        """Which share of the batch's terms part i has; equal shares of a batch without any."""
        equal = 1.0 / len(self._weights)
        if self._is_known(i):
            return float(self._weights[i]) / float(self._total) if self._total else equal
        import torch

        total = torch.as_tensor(self._total)
        return torch.where(total == 0, equal, self._weights[i] / torch.where(total == 0, 1, total))

    def _add(self, figures: Mapping[str, Any], scale: Any, part: Any) -> None:
        import torch

        if scale is None:  # a loss that sums says nothing of means: samples weigh them
            samples = batch_length(part) if len(self._weights) > 1 else 1
            before, self._samples = self._samples, self._samples + samples
            self.figures = {name: value * (before / self._samples) for name, value in self.figures.items()}
            scale = samples / self._samples
        for name, value in figures.items():
            value = value.detach().squeeze() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            self.figures[name] = self.figures.get(name, 0.0) + _scaled(value, scale)


def on_host(value: Any) -> bool:
    """Can this number be read without waiting for a device? A fake tensor has none to read."""
    if isinstance(value, int | float):
        return True
    from flatout.memory.fake_run import is_fake

    return value.device.type == "cpu" and not is_fake(value)


def figures_of(returned: Any) -> tuple[Any, dict[str, Any]]:
    """(loss, figures) of what a loss function returned: a loss, or both. UsageError for figures that are no scalars."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        return returned, {}
    for name, value in returned[1].items():
        if not isinstance(value, int | float) and not (hasattr(value, "numel") and value.numel() == 1):
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise UsageError(
                f"loss_fn returned {described(value)}{shape} as the figure {name!r}",
                limit="a figure beside the loss is a number or a scalar tensor, a mean over the batch",
                remedy="take its mean",
            )
    return returned[0], dict(returned[1])


def _scaled(value: Any, scale: Any) -> Any:
    """`value * scale`, but 0 for a share of 0: the mean of nothing may be NaN."""
    import torch

    if isinstance(scale, float):
        return value * scale if scale else torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0.0)
    return torch.where(scale == 0, 0.0, value * scale)
