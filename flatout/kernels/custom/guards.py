"""Memory that a kernel must not touch, before, after and between the elements of its inputs and outputs.

Guard zones hold a NaN with a payload of its own: what is written there shows as a changed bit, and what is read from
there shows as a NaN in the result. Outputs get theirs where Python allocates them: a Triton wrapper, a custom operator
or a ctypes function that calls `torch.empty` and its kin. What C++ allocates itself is left to AddressSanitizer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatout.replaced import replaced

GUARD_BYTES = 1024
"""On each side; a multiple of every alignment that matters to a kernel."""
Filler = Literal["input", "output", "zero"]
_PATTERNS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 0x7FC05A5A, 0x7FC0A5A5),
    torch.bfloat16: (torch.int16, 0x7FC5, 0x7FCA),
    torch.float16: (torch.int16, 0x7E5A, 0x7EA5),
    torch.float64: (torch.int64, 0x7FF800005A5A5A5A, 0x7FF80000A5A5A5A5),
}
"""dtype -> integers of its width, the NaN around inputs, the NaN around outputs. They differ: a kernel that reads the
one past its input and writes it past its output would leave no trace otherwise."""
_WHOLE = 0x5A


@dataclass(frozen=True)
class Guarded:
    """A tensor, the memory around it, and that memory as it was before the call."""

    label: str
    tensor: Tensor
    buffer: Tensor
    inside: Tensor
    """For each element of `buffer`: is it one of `tensor`?"""
    before: Tensor

    def changed(self) -> Tensor:
        """For each element of `buffer`: have its bits changed?"""
        now, then = (one.view(torch.uint8).view(len(self.inside), -1) for one in (self.buffer, self.before))
        return (now != then).any(1)

    def written_outside(self) -> str | None:
        """Where, in words; None: nowhere."""
        outside = (self.changed() & ~self.inside).nonzero().flatten().tolist()
        if not outside:
            return None
        own = self.inside.nonzero().flatten()
        first, last = (int(own[0]), int(own[-1])) if len(own) else (outside[0], outside[0] - 1)
        after, before = [at for at in outside if at > last], [at for at in outside if at < first]
        if after:
            where = "after its end, the first at the very next one" if after[0] == last + 1 else "after its end"
        else:
            where = "before its start" if before else "in the gaps between its elements"
        count = len(after or before or outside)
        return f"writes outside of {self.label}: {count} element{'' if count == 1 else 's'} {where}"

    def modified(self) -> bool:
        return bool((self.changed() & self.inside).any())

    def never_written(self) -> Tensor:
        """For each element of the tensor: does it still hold what the guard zone holds?"""
        return (~self.changed()).as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())


def strides_of(shape: Sequence[int], layout: str) -> tuple[tuple[int, ...], int]:
    """(strides, offset) in elements of a tensor that lies in memory like that."""
    sizes = [max(size, 1) for size in shape]
    order = list(range(len(sizes)))
    widths = sizes[:]
    if layout == "transposed":
        order[-2], order[-1] = order[-1], order[-2]
    if layout == "padded":
        widths[-1] += 3
    step = 2 if layout == "strided" else 1
    strides = [0] * len(sizes)
    for place in reversed(order):
        strides[place] = step
        step *= widths[place]
    if layout == "expanded":
        strides = [0, *strides_of(shape[1:], "contiguous")[0]]
    return tuple(strides), 1 if layout == "offset" else 0


def guarded(
    label: str,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device | str,
    filler: Filler,
) -> Guarded:
    """A tensor of that shape between guard zones; it holds what they hold."""
    margin = GUARD_BYTES // dtype.itemsize
    spread = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    span = 0 if 0 in shape else spread
    buffer = torch.empty(2 * margin + offset + span, dtype=dtype, device=device)
    fill_guard(buffer, filler)
    inside = torch.zeros(len(buffer), dtype=torch.bool, device=buffer.device)
    _once(inside, shape, strides, margin + offset).fill_(True)
    # Not `as_strided` of the buffer: autograd and custom operators would take it for a view of another tensor.
    tensor = torch.empty(0, dtype=dtype, device=buffer.device)
    tensor.set_(buffer.untyped_storage(), margin + offset, tuple(shape), tuple(strides))
    return Guarded(label, tensor, buffer, inside, buffer.clone())


def _once(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """The elements at those places, each once where it is expanded."""
    sizes = [min(size, 1) if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    return tensor.as_strided(sizes, strides, offset)


def with_values(one: Guarded, values: Tensor) -> Guarded:
    """The same, holding `values`."""
    target = _once(one.buffer, one.tensor.shape, one.tensor.stride(), int(one.tensor.storage_offset()))
    target.copy_(values[tuple(slice(0, size) for size in target.shape)])
    return Guarded(one.label, one.tensor, one.buffer, one.inside, one.buffer.clone())


def fill_guard(buffer: Tensor, filler: Filler) -> None:
    if filler == "zero":
        buffer.zero_()
    elif buffer.dtype in _PATTERNS:
        whole, of_input, of_output = _PATTERNS[buffer.dtype]
        buffer.view(whole).fill_(of_input if filler == "input" else of_output)
    elif buffer.dtype is torch.bool:
        buffer.fill_(True)
    else:
        buffer.fill_(_WHOLE)


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_FILLED = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full")


@contextlib.contextmanager
def guarded_allocations() -> Iterator[list[Guarded]]:
    """Tensors that Python code allocates meanwhile lie between guard zones; the list gets each of them."""
    made: list[Guarded] = []
    on = [True]

    def wrapper(keeps_values: bool) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def make(original: Callable[..., object]) -> Callable[..., object]:
            def allocate(*args: object, **kwargs: object) -> object:
                plain = original(*args, **kwargs)
                if not on[0] or type(plain) is not Tensor or not _is_ordinary(plain):
                    return plain
                on[0] = False  # the guarded tensor is allocated too
                try:
                    one = _around(plain, keeps_values)
                finally:
                    on[0] = True
                made.append(one)
                return one.tensor.requires_grad_(plain.requires_grad)

            return allocate

        return make

    with contextlib.ExitStack() as stack:
        for names, keeps in ((_EMPTY, False), (_FILLED, True)):
            for name in names:
                owner: object = Tensor if name.startswith("new_") else torch
                stack.enter_context(replaced(owner, name, wrapper(keeps)))
        yield made


def _is_ordinary(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_quantized
    return dense and tensor.device.type in ("cpu", "cuda") and not tensor.is_pinned() and math.prod(tensor.shape) > 0


def _around(plain: Tensor, keeps_values: bool) -> Guarded:
    one = guarded("an output", plain.shape, plain.stride(), 0, plain.dtype, plain.device, "output")
    return with_values(one, plain.detach()) if keeps_values else one
