"""The tensors of one case: drawn from its seed, laid out in memory, each between guard zones.

The values come from an expression in Python, and the same expression is shown to the user: what is printed is what ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.kernels.custom.argument_specs import WHOLE, Constant, TensorArgument
from flatout.kernels.custom.cases import Case, layout_applies
from flatout.kernels.custom.definition import Definition
from flatout.kernels.custom.footprint import shape_of
from flatout.kernels.custom.guards import Filler, Guarded, guarded, strides_of, with_values


@dataclass(frozen=True)
class Drawn:
    """The inputs of one call."""

    values: tuple[object, ...]
    """Tensors on the device, contiguous and without guards; constants as they are."""
    guarded: tuple[Guarded | None, ...]
    """The same values as the case lays them out; None for a constant."""

    @property
    def arguments(self) -> list[object]:
        """What the kernel is called with."""
        pairs = zip(self.values, self.guarded, strict=True)
        return [value if one is None else one.tensor for value, one in pairs]


def draw(definition: Definition, case: Case, device: str, filler: Filler = "input") -> Drawn:
    """The inputs; drawn again they have the same values."""
    torch.manual_seed(case.seed)
    values: list[object] = []
    laid_out: list[Guarded | None] = []
    for place, one in enumerate(definition.arguments):
        if isinstance(one, Constant):
            values.append(one.value)
            laid_out.append(None)
            continue
        drawn = eval(_expression(one, case), {"torch": torch}).to(device)  # see the module's docstring
        layout = _layout(case, place, one)
        if layout == "expanded":
            drawn = drawn[:1].expand_as(drawn) if len(drawn) else drawn
        strides, offset = strides_of(drawn.shape, layout)
        empty = guarded(definition.labels[place], drawn.shape, strides, offset, drawn.dtype, device, filler)
        values.append(drawn.contiguous())
        laid_out.append(with_values(empty, drawn))
    return Drawn(tuple(values), tuple(laid_out))


def unguarded(drawn: Drawn) -> list[object]:
    """The inputs laid out likewise, in memory of their own that ends where they do."""
    found: list[object] = []
    for value, one in zip(drawn.values, drawn.guarded, strict=True):
        if one is None or not isinstance(value, Tensor):
            found.append(value)
            continue
        shape, strides = one.tensor.shape, one.tensor.stride()
        offset = one.tensor.storage_offset() * one.tensor.element_size() % 64 // one.tensor.element_size()
        spread = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = torch.zeros(offset + (0 if 0 in shape else 1 + spread), dtype=value.dtype, device=value.device)
        once = [min(size, 1) if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
        memory.as_strided(once, strides, offset).copy_(value[tuple(slice(0, size) for size in once)])
        tensor = torch.empty(0, dtype=value.dtype, device=value.device)
        found.append(tensor.set_(memory.untyped_storage(), offset, shape, strides))
    return found


def reproduction(definition: Definition, case: Case, device: str, call: str = "kernel({})") -> str:
    """Lines of Python, joined by semicolons, that make the same inputs and call the kernel."""
    lines, names = [f"torch.manual_seed({case.seed})"], []
    for place, (label, one) in enumerate(zip(definition.labels, definition.arguments, strict=True)):
        if isinstance(one, Constant):
            names.append(repr(one.value))
            continue
        lines.append(f"{label} = {_laid_out(one, case, _layout(case, place, one), device)}")
        names.append(label)
    return "; ".join([*lines, call.format(", ".join(names))])


def _laid_out(argument: TensorArgument, case: Case, layout: str, device: str) -> str:
    shape = shape_of(argument, case.sizes)
    drawn = _expression(argument, case) + ("" if device == "cpu" else f".to({device!r})")
    if layout == "contiguous" or 0 in shape:
        return drawn
    if layout == "expanded":
        return f"({drawn})[:1].expand{shape}"
    strides, offset = strides_of(shape, layout)
    dtype = f"dtype=torch.{dtype_name(argument, case)}" + ("" if device == "cpu" else f", device={device!r}")
    if offset:
        count = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return f"torch.empty({count}, {dtype}).as_strided({shape}, {strides}, {offset}).copy_({drawn})"
    return f"torch.empty_strided({shape}, {strides}, {dtype}).copy_({drawn})"


def dtype_name(argument: TensorArgument, case: Case) -> str:
    return case.dtype if argument.dtype == "float" else argument.dtype


def _layout(case: Case, place: int, argument: TensorArgument) -> str:
    layout = case.layouts[place]
    return layout if layout_applies(layout, len(argument.dims)) else "contiguous"


def _expression(argument: TensorArgument, case: Case) -> str:
    """Its values, in Python, for the generator as `torch.manual_seed` left it."""
    shape, dtype = shape_of(argument, case.sizes), dtype_name(argument, case)
    if argument.dtype == "bool":
        return f"(torch.rand({shape}) < 0.5)"
    if argument.dtype in WHOLE:
        return _whole_numbers(argument, case, shape)
    if isinstance(argument.high, int | float) or argument.high is not None:
        low, high = argument.low or 0.0, _end(argument, case)
        drawn = f"(torch.rand({shape}) * {high - low!r} + {low!r})"
    elif case.values == "zeros":
        drawn = f"torch.zeros({shape})"
    elif case.values == "NaN":
        drawn = f"torch.randn({shape}).masked_fill(torch.rand({shape}) < 0.2, float('nan'))"
    elif case.values == "infinite":
        drawn = f"torch.where(torch.rand({shape}) < 0.2, torch.randn({shape}) * float('inf'), torch.randn({shape}))"
    else:
        drawn = f"(100 * torch.randn({shape}))" if case.values == "large" else f"torch.randn({shape})"
    return drawn if dtype == "float32" else f"{drawn}.to(torch.{dtype})"


def _whole_numbers(argument: TensorArgument, case: Case, shape: Sequence[int]) -> str:
    low, high = int(argument.low or 0), int(_end(argument, case))
    if high <= low:  # no element is drawn, see is_possible
        return f"torch.zeros({shape}, dtype=torch.{argument.dtype})"
    return f"torch.randint({low}, {high}, {shape}, dtype=torch.{argument.dtype})"


def _end(argument: TensorArgument, case: Case) -> float:
    return case.sizes[argument.high] if isinstance(argument.high, str) else float(argument.high or 0.0)


def copies(values: Sequence[object], dtype: torch.dtype | None = None) -> list[object]:
    """Of the tensors, floating-point ones in `dtype` if one is given."""

    def copy(one: object) -> object:
        if not isinstance(one, Tensor):
            return one
        return one.clone() if dtype is None or not one.is_floating_point() else one.to(dtype, copy=True)

    return [copy(one) for one in values]


def nudged_copies(values: Sequence[object]) -> list[object]:
    """Of the tensors; floating-point ones in float64, each element one rounding of its dtype off, up or down."""
    return [nudged(one) if isinstance(one, Tensor) and one.is_floating_point() else one for one in copies(values)]


def nudged(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device).double() * 2 - 1
    return tensor.double() * (1 + signs * torch.finfo(tensor.dtype).eps)
