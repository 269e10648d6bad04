"""Against torch's own two operations: values, gradients, ignored targets, dtypes; and what it holds at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from flatout.errors import UsageError
from flatout.kernels.linear_cross_entropy import linear_cross_entropy
from flatout.memory.tracking import Tracker

ROWS, FEATURES, CLASSES = 37, 8, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, FEATURES, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, FEATURES, dtype=dtype, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, CLASSES, (ROWS,))
    targets[::5] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_bytes", [1, 5 * CLASSES * 8, 1 << 20])
def test_equals_torch(smoothing: float, reduction: Any, chunk_bytes: int) -> None:
    hidden, weight, bias, targets = inputs()
    plain = functional.cross_entropy(
        functional.linear(hidden, weight, bias), targets, label_smoothing=smoothing, reduction=reduction
    )
    ours = linear_cross_entropy(
        hidden, weight, targets, bias, label_smoothing=smoothing, reduction=reduction, chunk_bytes=chunk_bytes
    )
    torch.testing.assert_close(ours, plain)
    expected = torch.autograd.grad(plain * 3, [hidden, weight, bias])
    torch.testing.assert_close(torch.autograd.grad(ours * 3, [hidden, weight, bias]), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_targets_changes_no_weight(smoothing: float, reduction: Any) -> None:
    """As torch: the mean of nothing is NaN and its gradients are zero, also where the caller divides by the count."""
    hidden, weight, bias, targets = inputs()
    targets[:] = -100
    count = (targets != -100).sum()
    how = {"label_smoothing": smoothing, "reduction": reduction}
    for divided in (False, True):
        plain = functional.cross_entropy(functional.linear(hidden, weight, bias), targets, **how)
        ours = linear_cross_entropy(hidden, weight, targets, bias, **how)
        if divided:
            plain, ours = plain / count, ours / count
        torch.testing.assert_close(ours, plain, equal_nan=True)
        for one, other in zip(
            torch.autograd.grad(ours, [hidden, weight, bias]),
            torch.autograd.grad(plain, [hidden, weight, bias]),
            strict=True,
        ):
            assert not one.any()
            assert torch.equal(one, other)


@pytest.mark.parametrize(("every", "computed"), [(20, ROWS), (2, ROWS // 2), (1, 0)])
def test_where_many_rows_are_ignored_their_scores_are_not_computed(every: int, computed: int) -> None:
    hidden, weight, bias, targets = inputs()
    targets = torch.randint(0, CLASSES, (ROWS,))
    targets[::every] = -100
    plain = functional.cross_entropy(functional.linear(hidden, weight, bias), targets, reduction="sum")
    with FlopCounterMode(display=False) as counter:
        ours = linear_cross_entropy(hidden, weight, targets, bias, reduction="sum")
    torch.testing.assert_close(ours, plain)
    assert counter.get_total_flops() == 3 * 2 * computed * FEATURES * CLASSES
    for _ in range(2):
        expected = torch.autograd.grad(plain * 3, [hidden, weight, bias], retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(ours * 3, [hidden, weight, bias], retain_graph=True), expected)


def test_ignored_rows_get_no_gradient_whatever_comes_from_above() -> None:
    hidden, weight, bias, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets, bias, reduction="sum") * torch.inf
    (of_hidden,) = torch.autograd.grad(loss, [hidden])
    assert not of_hidden[targets == -100].any()


def test_shapes_without_bias_and_with_frozen_weight() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    weight.requires_grad_(False)
    deep, flat = hidden[:36].view(4, 9, FEATURES), targets[:36].view(4, 9)
    plain = functional.cross_entropy(functional.linear(hidden[:36], weight), targets[:36])
    ours = linear_cross_entropy(deep, weight, flat)
    torch.testing.assert_close(ours, plain)
    ours.backward()
    (expected,) = torch.autograd.grad(plain, [hidden])
    torch.testing.assert_close(hidden.grad, expected)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(deep, weight, flat), plain)


def test_under_autocast() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = functional.cross_entropy(functional.linear(hidden, weight, bias), targets)
        ours = linear_cross_entropy(hidden, weight, targets, bias)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    expected = torch.autograd.grad(plain, [hidden, weight, bias])
    seen = torch.autograd.grad(ours, [hidden, weight, bias])
    assert [one.dtype for one in seen] == [torch.float32] * 3
    torch.testing.assert_close(seen, expected, rtol=2e-2, atol=2e-2)


def test_the_scores_are_never_held_together() -> None:
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = torch.randn(4096, 16, requires_grad=True)
    targets = torch.randint(0, 4096, (512,))
    scores = 512 * 4096 * 4
    with Tracker() as tracker:
        linear_cross_entropy(hidden, weight, targets, chunk_bytes=scores // 32).backward()
    assert tracker.peak_bytes < scores / 4
    with Tracker() as tracker:
        functional.cross_entropy(functional.linear(hidden, weight), targets).backward()
    assert tracker.peak_bytes > 2 * scores


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.randn(11, 7)}, r"hidden is \[37, 8\] and weight \[11, 7\]"),
        ({"targets": torch.zeros(36, dtype=torch.long)}, r"targets are \[36\]"),
        ({"targets": torch.zeros(37)}, "torch.float32"),
        ({"bias": torch.zeros(10)}, r"bias is \[10\]"),
        ({"reduction": "none"}, "reduction is 'none'"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_bytes": "1 MiB"}, "chunk_bytes is '1 MiB'"),
        ({"label_smoothing": 2.0}, "label_smoothing is 2.0"),
        ({"targets": torch.zeros(37, dtype=torch.uint8)}, "torch.uint8"),
        ({"weight": torch.zeros(0, 8)}, r"weight \[0, 8\]"),
        ({"weight": torch.zeros(11, 8, dtype=torch.long)}, "weight torch.int64; .* floating-point"),
        ({"hidden": torch.zeros(37, 8, dtype=torch.complex64)}, "hidden is torch.complex64"),
    ],
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    given = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias} | change
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("wrong", [CLASSES, 10_000, -1])
def test_a_target_that_is_no_class_is_named(wrong: int) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    targets[3] = wrong
    with pytest.raises(UsageError, match=rf"a target is class {wrong}; weight has {CLASSES} rows"):
        linear_cross_entropy(hidden, weight, targets)


def test_gradients_are_scaled_anew_in_every_backward_pass() -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, bias]
    expected = torch.autograd.grad(functional.cross_entropy(functional.linear(*leaves), targets), leaves)
    loss = linear_cross_entropy(hidden, weight, targets, bias)
    for factor, retain in ((3.0, True), (0.5, True), (7.0, False)):
        found = torch.autograd.grad(loss * factor, leaves, retain_graph=retain)
        torch.testing.assert_close(found, tuple(one * factor for one in expected))


def test_small_gradients_of_fp16_do_not_vanish_before_the_loss_scale() -> None:
    """A probability of a millionth over 100 rows is below fp16's smallest number."""
    torch.manual_seed(0)
    weight = torch.randn(400, 16).half().float().requires_grad_()
    hidden = (torch.randn(100, 16) * 2).half().float().requires_grad_()
    targets = torch.randint(0, 400, (100,))
    expected = torch.autograd.grad(functional.cross_entropy(hidden @ weight.T, targets), [hidden, weight])
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets)
    scaled = torch.autograd.grad(loss * 2.0**16, [hidden, weight])
    found = [one / 2.0**16 for one in scaled]
    assert (found[1] != 0).all()
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01
    rows = (found[1] - expected[1]).norm(dim=1) / expected[1].norm(dim=1)
    assert rows.max() < 0.05  # those of rare classes too


def test_gradients_of_a_mean_are_as_exact_as_fp64() -> None:
    """They were multiplied by 1 / terms as an fp32 number: 3e-8 off."""
    hidden, weight, _, targets = inputs()
    wanted = torch.autograd.grad(functional.cross_entropy(functional.linear(hidden, weight), targets), [hidden, weight])
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), [hidden, weight])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_meta_device_it_has_shapes_alone(dtype: torch.dtype) -> None:
    hidden, weight, bias = (one.to("meta", dtype).detach().requires_grad_() for one in inputs()[:3])
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(hidden, weight, inputs()[3].to("meta"), bias)
        assert (loss.device.type, loss.shape, loss.dtype) == ("meta", (), torch.float32)
        gradients = torch.autograd.grad(loss, [hidden, weight, bias])
        assert [(one.shape, one.dtype, one.device.type) for one in gradients] == [
            (one.shape, dtype, "meta") for one in (hidden, weight, bias)
        ]


@pytest.mark.parametrize(("place", "what"), [(1, "weight is"), (2, "bias is"), (3, "targets are")])
def test_tensors_on_two_devices_are_refused(place: int, what: str) -> None:
    """In bf16 on a CPU the gradients were memory that nothing had been written to."""
    given = list(inputs(torch.bfloat16))
    given[place] = given[place].to("meta")
    hidden, weight, bias, targets = given
    with pytest.raises(UsageError, match=rf"^{what} on meta and hidden on cpu; they are on one device; move it"):
        linear_cross_entropy(hidden, weight, targets, bias)
