"""Kernels with one mistake each: it is found, named for what it is, and shown as the smallest case."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.custom.definitions import checked, defined, right

pytestmark = pytest.mark.usefixtures("one_thread")

Kernel = Callable[[Tensor, Tensor], Tensor]


def wrong_in_one_corner(x: Tensor, w: Tensor) -> Tensor:
    y = right(x, w)
    if x.shape[1] > 8 and x.shape[1] % 8:  # the rest of a row that blocks of 8 leave
        y[..., -1] *= 1.01
    return y


def one_past_the_end(x: Tensor, w: Tensor) -> Tensor:
    y = right(x, w)
    if y.numel() % 4:
        y.as_strided((1,), (1,), int(y.storage_offset()) + y.numel()).fill_(3.0)
    return y


def takes_every_input_for_contiguous(x: Tensor, w: Tensor) -> Tensor:
    return right(x.as_strided(x.shape, (x.shape[1], 1), int(x.storage_offset())), w)


def leaves_the_last_element(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    y.view(-1)[:-1] = right(x, w).view(-1)[:-1]
    return y


def changes_its_input(x: Tensor, w: Tensor) -> Tensor:
    y = right(x, w)
    w += 1
    return y


def sums_in_low_precision(x: Tensor, w: Tensor) -> Tensor:
    if x.dtype is not torch.float16:
        return right(x, w)
    mean = x.pow(2).mean(-1, keepdim=True) * (1 + 0.05 * (x.shape[1] > 100))
    return x * torch.rsqrt(mean + 1e-5) * w


@pytest.mark.parametrize(
    ("kernel", "of", "case", "what"),
    [
        (wrong_in_one_corner, "forward", "rows=1, width=9, float32", "output: element [0, 8] is"),
        (
            one_past_the_end,
            "memory",
            "rows=1, width=1, float32",
            "writes outside of the float32[1, 1] that it allocates",
        ),
        (takes_every_input_for_contiguous, "memory", "rows=2, width=1, float32, x", "reads outside of its inputs"),
        (leaves_the_last_element, "forward", "rows=1, width=1, float32", "1 of 1 elements were never written"),
        (changes_its_input, "memory", "rows=0, width=1, float32", "changes its input w; if it is meant to"),
        (sums_in_low_precision, "forward", "float16", "output: element"),
        (
            lambda x, w: right(x, w).double(),
            "forward",
            "rows=0, width=0",
            "output is float64[0, 0], the reference's is",
        ),
        (lambda x, w: right(x, w)[:-1], "forward", "rows=1, width=0", "output is float32[0, 0], the reference's is"),
        (lambda x, w: (right(x, w), x), "forward", "rows=0, width=0", "gives 2 tensors, the reference 1"),
        (lambda x, w: right(x, w) if x.shape[0] < 5 else 1 / 0, "forward", "rows=5, width=0", "ZeroDivisionError"),
    ],
)
def test_it_is_found(kernel: Kernel, of: str, case: str, what: str) -> None:
    properties, _ = checked(defined(kernel, gradient=False, compiles=False))
    wrong = {name: one for name, one in properties.items() if one.verdict == "failed"}
    assert list(wrong) == [of] or (of == "memory" and set(wrong) == {"memory", "forward"})
    failure = wrong[of].failure
    assert failure is not None
    assert case in failure.case
    assert what in failure.what
    assert failure.reproduce.startswith("torch.manual_seed(")
    assert failure.reproduce.endswith("; kernel(x, w)")


def test_one_that_hides_a_nan_is_found() -> None:
    def hides_nan(x: Tensor, w: Tensor) -> Tensor:
        return torch.nan_to_num(right(x, w), nan=0.0, posinf=float("inf"), neginf=-float("inf"))

    properties, _ = checked(defined(hides_nan, gradient=False, compiles=False))
    assert [name for name, one in properties.items() if one.verdict == "failed"] == ["non-finite"]
    failure = properties["non-finite"].failure
    assert failure is not None
    assert "NaN values" in failure.case
    assert "is 0, expected nan" in failure.what
    assert failure.what.endswith("; if it need not pass them on, say so: nonfinite = False")
    properties, _ = checked(defined(hides_nan, gradient=False, compiles=False, nonfinite=False))
    assert not [one for one in properties.values() if one.verdict == "failed"]


def test_inputs_with_a_range_hold_no_nan() -> None:
    fields = {"inputs": ("float[n] 0..1",), "reference": lambda x: x * 2, "gradient": False, "compiles": False}
    properties, _ = checked(defined(lambda x: torch.nan_to_num(x) * 2, **fields))
    assert properties["non-finite"].text == "no input can be NaN or infinite"
    assert properties["forward"].verdict == "passed"


def test_one_that_returns_its_input_is_found_where_the_reference_returns_a_copy() -> None:
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    fields = {"inputs": ("float[n]",), "gradient": False, "compiles": False, "dtypes": ("float32",)}
    failure = checked(defined(lambda x: x, reference=copied, **fields))[0]["memory"].failure
    assert failure is not None
    assert failure.case == "n=1, float32"
    assert failure.what == ("output shares memory with its input x, the reference's is new; return a copy: x.clone()")
    for kernel in (copied, lambda x: x):  # the reference's own view says that one is allowed
        assert checked(defined(kernel, reference=lambda x: x, **fields))[0]["memory"].verdict == "passed"


def test_a_right_one_passes_everything() -> None:
    properties, told = checked(defined(right), timing=True)
    verdicts = {name: one.verdict for name, one in properties.items()}
    assert verdicts == {
        **dict.fromkeys(
            ("forward", "memory", "repeatable", "non-finite", "gradient", "compile", "autocast", "timed sizes"),
            "passed",
        ),
        "operator": "noted",
    }
    speeds = [one["speed"] for one in told if "speed" in one]
    assert [one["case"].rpartition(", ")[2] for one in speeds] == ["float32", "bfloat16", "float16"]
    assert all(one["kernel"]["samples_seconds"] for one in speeds)


def test_one_that_is_wrong_from_some_size_on_is_not_timed() -> None:
    def kernel(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 1 << 18 else x * 2.01

    fields = {"inputs": ("float[n]",), "reference": lambda x: x * 2, "dtypes": ("float32",), "compiles": False}
    properties, told = checked(defined(kernel, **fields), timing=True)
    wrong = {name: one for name, one in properties.items() if one.verdict == "failed"}
    assert list(wrong) == ["timed sizes"]
    assert wrong["timed sizes"].failure is not None
    assert wrong["timed sizes"].failure.case == "n=262144, float32"
    assert not [one for one in told if "speed" in one]
    assert told[-1] == {"speed_reason": "a wrong kernel's time says nothing"}


def test_a_random_one_is_noted() -> None:
    chance = random.Random(0)
    noisy = defined(lambda x, w: right(x, w) * (1 + chance.choice((0, 2e-7))), dtypes=("float32",), compiles=False)
    properties, _ = checked(noisy)
    assert properties["repeatable"].verdict == "noted"
    assert properties["repeatable"].text.startswith("not deterministic: ")
    assert properties["forward"].verdict == "passed"


def test_a_kernel_that_writes_to_its_argument() -> None:
    def kernel(x: Tensor, out: Tensor) -> None:
        out.copy_(2 * x)

    def broken(x: Tensor, out: Tensor) -> None:
        out[:-1].copy_(2 * x[:-1])

    fields = {"inputs": ("float[n]", "float[n]"), "mutates": (1,), "reference": kernel, "labels": ("x", "out")}
    assert {one.verdict for one in checked(defined(kernel, **fields))[0].values()} == {"passed", "skipped", "noted"}
    failed = checked(defined(broken, **fields))[0]["forward"]
    assert failed.failure is not None
    assert failed.failure.case == "n=1, float32"


def test_where_the_reference_itself_fails_nothing_is_said_of_the_kernel() -> None:
    def reference(x: Tensor) -> Tensor:
        return x.max(dim=0).values

    fields = {"inputs": ("float[n]",), "reference": reference, "gradient": False, "compiles": False}
    properties, told = checked(defined(reference, **fields))
    assert properties["forward"].verdict == "passed"
    (note,) = [one["note"] for one in told if "note" in one]
    assert "such as n=0" in note
    assert "IndexError" in note


def test_indices_stay_below_their_size() -> None:
    def reference(table: Tensor, index: Tensor) -> Tensor:
        return table[index]

    def kernel(table: Tensor, index: Tensor) -> Tensor:
        return table[index.clamp(max=7)]

    fields = {"inputs": ("float[rows, 2]", "int64[n] < rows"), "reference": reference, "labels": ("table", "index")}
    properties, _ = checked(defined(kernel, compiles=False, gradient=False, **fields))
    failure = properties["forward"].failure
    assert failure is not None
    assert "rows=9" in failure.case or "rows=1" in failure.case


@pytest.mark.parametrize("adds", [0.0, 1.0], ids=["right", "wrong"])
def test_constants_are_passed_as_they_are(adds: float) -> None:
    seen: set[tuple[object, ...]] = set()

    def scaled(x: Tensor, factor: float, flag: bool, nothing: None) -> Tensor:
        return x * factor if flag else x.clone()

    def kernel(x: Tensor, factor: float, flag: bool, nothing: None) -> Tensor:
        seen.add((factor, flag, nothing))
        return scaled(x, factor, flag, nothing) + adds

    given = {"inputs": ("float[rows, width]", 2.5, True, None), "labels": ("x", "factor", "flag", "nothing")}
    properties, _ = checked(defined(kernel, reference=scaled, compiles=False, **given))
    assert properties["forward"].verdict == ("failed" if adds else "passed"), properties["forward"]
    if adds:
        assert "kernel(x, 2.5, True, None)" in str(properties["forward"])
    else:
        assert properties["gradient"].verdict == "passed"
    assert seen == {(2.5, True, None)}
