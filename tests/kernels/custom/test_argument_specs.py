"""What a kernel takes, as it is written."""

from __future__ import annotations

import pytest

from flatout.errors import UsageError
from flatout.kernels.custom.argument_specs import Constant, TensorArgument, parse_argument


@pytest.mark.parametrize(
    ("spec", "dtype", "dims", "low", "high"),
    [
        ("float[rows, width]", "float", ("rows", "width"), None, None),
        ("float32[rows,4]", "float32", ("rows", 4), None, None),
        ("int64[rows] < width", "int64", ("rows",), 0, "width"),
        ("int32[] 5..9", "int32", (), 5, 9),
        ("float[n] 0..0.5", "float", ("n",), 0, 0.5),
        ("float[n] -1..1e-3", "float", ("n",), -1, 0.001),
        ("bool[n]", "bool", ("n",), None, None),
    ],
)
def test_a_tensor(spec: str, dtype: str, dims: object, low: object, high: object) -> None:
    found = parse_argument(spec)
    assert isinstance(found, TensorArgument)
    assert (found.dtype, found.dims, found.low, found.high) == (dtype, dims, low, high)


@pytest.mark.parametrize("value", [1e-5, 3, True, None])
def test_a_constant(value: object) -> None:
    assert parse_argument(value) == Constant(value=value)  # type: ignore[arg-type]


def test_names_of_sizes_include_the_upper_end() -> None:
    found = parse_argument("int64[rows, rows] < width")
    assert isinstance(found, TensorArgument)
    assert found.names == ("rows", "width")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("flaot[rows]", "did you mean float"),
        ("float(rows)", "an input is written as"),
        ("float[rows, 2x]", "has the size '2x'"),
        ("int64[rows]", "write 'int64\\[rows\\] < 1000'"),
        ("int64[rows] 5..5", "leaves no number"),
        ("bool[rows] < 2", "only numbers have one"),
        ([1, 2], "an input is list"),
    ],
)
def test_what_is_neither_is_refused_with_a_remedy(spec: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_argument(spec)
