"""How much work the parts of a model are where nothing can be timed: in a forecast, on fake tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.flops import OperationCount
from flatout.operator_bytes import moved_bytes
from flatout.torch_private.dispatch import ListeningMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

OPERATIONS_PER_BYTE = 10.0
"""What is computed while a byte is moved. With it, what comes before and after the blocks of four models, in blocks,
was within 0.2 of what was timed on a Zen 4 (fp32). On GPUs it is more, for the blocks as for what is around them."""


class Work(ListeningMode):
    """Within this context `done` grows by what each operation takes: by its products, or, where that is more, by the
    bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0.0
        self._operations = OperationCount()

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = func(*args, **kwargs)
        products = self._operations.of(func, args, kwargs, out) or 0.0
        self.done += max(products, OPERATIONS_PER_BYTE * moved_bytes(func, args, kwargs, out))
        return out
