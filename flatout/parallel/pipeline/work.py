"""How much work the parts of a model are where nothing can be timed: in a forecast, on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatout.flops import OperationCount
from flatout.torch_private.dispatch import TorchDispatchMode, tree_leaves

OPERATIONS_PER_BYTE = 10.0
"""What is computed while a byte is moved. With it, what comes before and after the blocks of four models, in blocks,
was within 0.2 of what was timed on a Zen 4 (fp32). On GPUs it is more, for the blocks as for what is around them."""
_GATHERED = ("embedding", "index", "index_select", "gather")
"""Operations that read as much of their first input as they return."""


class Work(TorchDispatchMode):
    """Within this context `done` grows by what each operation takes: by its products, or, where that is more, by the
    bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.done = 0.0
        self._operations = OperationCount()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        read = args[1:] if func.overloadpacket.__name__ in _GATHERED else args
        moved = sum(one.nbytes for one in tree_leaves((read, kwargs, out)) if isinstance(one, torch.Tensor))
        self.done += max(self._operations.of(func, args, kwargs, out) or 0.0, OPERATIONS_PER_BYTE * moved)
        return out
