"""Where the samples lie in each tensor of a model's output: found by running one row and then several.

    [batch, ...]            as most models have it
    [layers, batch, ...]    the last states of torch's recurrent layers, the memories of XLNet
    no dimension for one    what `x.squeeze()` leaves of a batch of one

>>> import torch
>>> one, three = torch.zeros(2, 1, 6), torch.zeros(2, 3, 6)
>>> find_layout({"state": one}, {"state": three}, 3)
(Layout(batch={'state': 1}, squeezed=frozenset()), '')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flatout.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """Dimension of the batch by path of the output (0 for a path that is not named)."""

    batch: Mapping[str, int] = field(default_factory=dict)
    squeezed: frozenset[str] = frozenset()
    """Paths that have no batch dimension where the batch is one row."""

    def dimension(self, path: str, leaf: Tensor, rows: int) -> int | None:
        """Along which the samples of an output of so many rows lie; None: it is one sample's as it stands.

        UsageError where it has not a row for each.
        """
        if rows == 1 and path in self.squeezed:
            return None
        dimension = self.batch.get(path, 0)
        if leaf.dim() <= dimension or leaf.shape[dimension] != rows:
            what = f"{path} is {list(leaf.shape)} for a batch of {rows}"
            remedy = "wrap the model so that it returns only what belongs to samples"
            raise UsageError(what, limit="each tensor of the output has a row for each sample", remedy=remedy)
        return dimension


def find_layout(one: Mapping[str, Tensor], several: Mapping[str, Tensor], rows: int) -> tuple[Layout, str]:
    """From the outputs for one row and for `rows` of the same shape; with the reason where there is no such layout."""
    if one.keys() != several.keys():
        return Layout(), f"it returns {', '.join(several)} for {rows} samples, {', '.join(one)} for one"
    batch: dict[str, int] = {}
    squeezed = set()
    for path, leaf in one.items():
        alone, together = tuple(leaf.shape), tuple(several[path].shape)
        changed = [d for d, (a, b) in enumerate(zip(alone, together, strict=False)) if a != b]
        if together == (rows, *alone):
            squeezed.add(path)
            batch[path] = 0
        elif len(alone) == len(together) and [(alone[d], together[d]) for d in changed] == [(1, rows)]:
            batch[path] = changed[0]
        else:
            return Layout(), f"{path} is {list(together)} for {rows} samples, {list(alone)} for one"
    return Layout({path: at for path, at in batch.items() if at}, frozenset(squeezed)), ""
