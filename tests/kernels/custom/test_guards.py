"""Memory around tensors: what is written or read there is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.kernels.custom.cases import layout_applies
from flatout.kernels.custom.definition import LAYOUTS
from flatout.kernels.custom.guards import Guarded, guarded, guarded_allocations, strides_of, with_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


def made(layout: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 4)) -> Guarded:
    strides, offset = strides_of(shape, layout)
    empty = guarded("x", shape, strides, offset, dtype, "cpu", "input")
    rows = shape[0] if layout != "expanded" else 1
    return with_values(empty, torch.arange(rows * shape[1]).view(rows, shape[1]).expand(shape).to(dtype))


def poked(one: Guarded, at: int) -> None:
    """Write one element, counted from the tensor's first one."""
    one.tensor.as_strided((1,), (1,), int(one.tensor.storage_offset()) + at).fill_(7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_there_and_nothing_has_changed(layout: str, dtype: torch.dtype) -> None:
    one = made(layout, dtype)
    assert one.tensor[-1].tolist()[-1] == (3 if layout == "expanded" else 11)
    assert one.written_outside() is None
    assert not one.modified()
    assert layout_applies(layout, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "at", "where"),
    [
        ("contiguous", 12, "1 element after its end, the first at the very next one"),
        ("contiguous", 20, "1 element after its end"),
        ("contiguous", -1, "1 element before its start"),
        ("padded", 5, "1 element in the gaps between its elements"),
        ("strided", 1, "1 element in the gaps between its elements"),
    ],
)
def test_a_write_outside_is_placed(layout: str, at: int, where: str, dtype: torch.dtype) -> None:
    one = made(layout, dtype)
    poked(one, at)
    assert one.written_outside() == f"writes outside of x: {where}"
    assert not one.modified()


def test_a_write_inside_is_a_modification() -> None:
    one = made("strided")
    one.tensor[1, 1] = 9
    assert one.modified()
    assert one.written_outside() is None


def test_a_kernel_that_copies_one_too_many_is_seen_although_both_hold_nan() -> None:
    source = made("contiguous")
    with guarded_allocations() as outputs:
        target = torch.empty(3, 4)
    target.as_strided((13,), (1,), target.storage_offset()).copy_(
        source.tensor.as_strided((13,), (1,), source.tensor.storage_offset()) * 2
    )
    (one,) = outputs
    assert one.written_outside() is not None


def test_allocations_of_python_are_guarded_and_keep_what_they_are_to_hold() -> None:
    like = torch.ones(2, 3, requires_grad=True)
    with guarded_allocations() as outputs:
        found: list[Tensor] = [
            torch.empty(2, 3),
            torch.zeros(2, 3),
            torch.full((2, 3), 4.0),
            like.new_ones(2, 3),
            torch.empty_like(like),
            torch.empty_strided((2, 3), (1, 2)),
        ]
    assert [one.tensor.data_ptr() for one in outputs] == [one.data_ptr() for one in found]
    assert found[0].isnan().all()
    assert (float(found[1].sum()), float(found[2].sum()), float(found[3].sum())) == (0, 24, 6)
    assert found[5].stride() == (1, 2)
    assert torch.empty(2, 3).untyped_storage().nbytes() == 24, "the original is back"


def test_what_was_never_written_is_seen() -> None:
    with guarded_allocations() as outputs:
        y = torch.empty(4)
    y[:3] = 1
    assert outputs[0].never_written().tolist() == [False, False, False, True]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_tensors(shape: tuple[int, int]) -> None:
    strides, offset = strides_of(shape, "padded")
    one = guarded("x", shape, strides, offset, torch.float32, "cpu", "input")
    assert one.tensor.shape == shape
    poked(one, 0)
    assert "writes outside of x" in str(one.written_outside())
