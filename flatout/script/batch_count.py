"""How many samples and tokens a step trains on, from the batches that a DataLoader hands out.

A sample is an entry of the first dimension of a batch's first tensor; tokens are counted where that tensor holds
integers [batch, tokens] and the model has an embedding that could look them up.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatout.data.nested import tensors_in
from flatout.levers.subject import Subject

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

NO_LOADER = "unknown, because no DataLoader feeds the steps"
NO_TENSOR = "unknown, because the loader's batches hold no tensor with a batch dimension"
NO_TOKENS = "unknown, because batches do not begin with integers [batch, tokens] for an embedding"
_TOKEN_KEYS = ("input_ids", "tokens", "ids")
_MOST_STEPS = 4096


class BatchCount:
    """Fed with batches and the ends of steps; the medians per step are read at the end."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._samples, self._tokens = 0, 0
        self._drew = self._without_tensor = self._embeds = False
        self._steps: deque[tuple[int, int]] = deque(maxlen=_MOST_STEPS)

    def batch(self, loader: DataLoader[object] | None, batch: object) -> None:
        """loader: only those that feed training count."""
        if loader is None or loader not in self._subject.loaders:
            return
        from flatout.torch_private.dispatch import without_torch_function

        with without_torch_function():  # the script's own modes must not see our operations
            found = _samples_and_tokens(batch)
        if found is None:
            self._without_tensor = True
            return
        self._drew = True
        self._samples += found[0]
        self._tokens += found[1]

    def step_ended(self) -> None:
        if self._drew:
            if not self._steps:  # now, as the model may be gone at the end
                self._embeds = self._has_embedding()
            self._steps.append((self._samples, self._tokens))
        self._samples = self._tokens = 0
        self._drew = False

    @property
    def samples_per_step(self) -> float | None:
        return float(statistics.median(samples for samples, _ in self._steps)) if self._steps else None

    @property
    def tokens_per_step(self) -> float | None:
        tokens = [count for _, count in self._steps if count]
        if len(tokens) < len(self._steps) or not tokens or not self._embeds:
            return None
        return float(statistics.median(tokens))

    def reasons(self) -> Mapping[str, str]:
        """Why what is None is unknown."""
        found = {}
        if self.samples_per_step is None:
            found["samples_per_step"] = NO_TENSOR if self._without_tensor else NO_LOADER
        if self.tokens_per_step is None:
            found["tokens_per_step"] = found.get("samples_per_step", NO_TOKENS)
        return found

    def _has_embedding(self) -> bool:
        from torch import nn

        kinds = (nn.Embedding, nn.EmbeddingBag)
        return any(isinstance(one, kinds) for module in self._subject.modules for one in module.modules())


def _samples_and_tokens(batch: object) -> tuple[int, int] | None:
    """Of one batch; 0 tokens where it has none. None: no tensor with a batch dimension."""
    from torch import Tensor

    named = next((batch[key] for key in _TOKEN_KEYS if key in batch), batch) if isinstance(batch, Mapping) else batch
    first = next((one for _, one in tensors_in(named) if isinstance(one, Tensor) and one.dim()), None)
    if first is None:
        return None
    indices = first.dim() == 2 and first.element_size() > 1 and not first.is_floating_point() and not first.is_complex()
    return len(first), first.numel() if indices else 0
