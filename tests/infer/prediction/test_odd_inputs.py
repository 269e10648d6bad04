"""predict with dtypes, arrays, models and iterators that are out of the ordinary; and by several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.errors import UsageError
from flatout.infer.prediction.predict import Predictor
from flatout.infer.prediction.predicted import Failed
from flatout.models import Bert, BertConfig
from flatout.plan import Plan


class Scaled(nn.Module):
    """In fp32, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() if x.is_complex() else x.float()) * self.scale


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 3, 3), (5,)])
def test_dtypes_that_torch_hardly_computes_in(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [torch.arange(number, number + torch.Size(shape).numel()).view(shape).to(dtype) for number in range(6)]
    for found, one in zip(flatout.predict(Scaled(), inputs), inputs, strict=True):
        torch.testing.assert_close(found, one.abs() if one.is_complex() else one.float())


def test_complex_sequences_are_padded_and_their_padding_is_tested() -> None:
    inputs = [torch.randn(length, 4, dtype=torch.complex64) for length in (2, 3, 4, 5, 6, 7)]
    predictions = flatout.predict(Scaled(), inputs, Plan(batching="padded"))
    for found, one in zip(predictions, inputs, strict=True):
        torch.testing.assert_close(found, one.abs())
    assert predictions.figures.batches["padded"] == 1


@pytest.mark.parametrize(
    "array", [np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1], np.ones((2, 3, 4), ">f4")], ids=["flip", "big"]
)
def test_arrays_that_torch_does_not_take(array: np.ndarray) -> None:
    for found in flatout.predict(Scaled(), [array] * 5):
        np.testing.assert_array_equal(found.numpy(), array.astype(np.float32))


def test_an_imaginary_part_counts() -> None:
    class Coupled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x, x * len(x))

    inputs = [torch.full((3,), float(value)) for value in range(1, 7)]
    for found, one in zip(flatout.predict(Coupled(), inputs), inputs, strict=True):
        assert torch.equal(found, torch.complex(one, one))

    class NotFinite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x, x * float("nan"))

    (failed,) = flatout.predict(NotFinite(), inputs[:1], check_finite=True)
    assert "3 of 3 values" in str(failed)


def test_sparse_outputs_are_compared() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().to_sparse()

    inputs = torch.randn(6, 3)
    for found, one in zip(flatout.predict(Sparse(), inputs), inputs, strict=True):
        assert torch.equal(found.to_dense(), one.relu())


def test_what_is_nested_is_marked() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    assert "nested tensor" in str(flatout.predict(nn.Linear(3, 2), [nested]).collect()[0])


def test_a_model_of_several_dtypes_keeps_them() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x.bfloat16()).float())
            return out

    model, inputs = Mixed(), torch.randn(6, 4)
    with torch.no_grad():
        right = model(inputs)
    found = flatout.predict(model, inputs).collect()
    torch.testing.assert_close(torch.stack(found), right, atol=1e-6, rtol=1e-5)


def test_a_buffer_keeps_its_digits() -> None:
    class Since(nn.Module):
        start: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("start", torch.tensor([1.7e9 + 1], dtype=torch.float64))
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x.double() + 1.7e9 - self.start).float() * self.one

    assert flatout.predict(Since(), [torch.tensor([3.0])] * 5).collect() == [torch.tensor([2.0])] * 5


def test_a_model_without_weights_computes_in_what_it_is_given() -> None:
    class Difference(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - 1.7e9

    inputs = [torch.tensor([1.7e9 + 0.25], dtype=torch.float64)] * 5
    assert all(float(one) == 0.25 for one in flatout.predict(Difference(), inputs))


def test_a_vocabulary_of_outputs_forbids_no_floats() -> None:
    class Heard(nn.Linear):
        config = SimpleNamespace(vocab_size=32)

    outputs = flatout.predict(Heard(8, 32), [torch.randn(5, 8) for _ in range(5)]).collect()
    assert all(one.shape == (5, 32) for one in outputs)


def test_models_that_are_hard_to_copy() -> None:
    class Forgetful(nn.Linear):
        def train(self, mode: bool = True) -> None:  # type: ignore[override]
            super().train(mode)

    assert len(flatout.predict(Forgetful(3, 2), torch.ones(5, 3)).collect()) == 5
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = torch.nn.utils.weight_norm(nn.Linear(3, 2))
    normed(torch.ones(1, 3))
    found = torch.stack(flatout.predict(normed, torch.ones(5, 3)).collect())
    torch.testing.assert_close(found, normed(torch.ones(5, 3)).detach())
    with pytest.raises(UsageError, match=r"weights are on the meta device.*load them"):
        flatout.predict(nn.Linear(3, 2, device="meta"), torch.ones(5, 3), device="cpu")
    with pytest.raises(UsageError, match="device is 'meta'; predict computes with values"):
        flatout.predict(nn.Linear(3, 2), torch.ones(5, 3), device="meta")
    with pytest.raises(UsageError, match="device is 'mtia'; torch sees cpu"):
        flatout.predict(nn.Linear(3, 2), torch.ones(5, 3), device="mtia")


def test_what_was_made_in_inference_mode_works_outside_of_it() -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    with torch.inference_mode():
        predictions = flatout.predict(Counting(), torch.ones(6, 3))
    assert not any(isinstance(one, Failed) for one in predictions)


def test_an_autocast_around_the_call_does_not_apply() -> None:
    model, inputs = nn.Linear(8, 8), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.stack(flatout.predict(model, inputs).collect())
    torch.testing.assert_close(found, model(inputs).detach(), atol=1e-6, rtol=1e-5)


def test_outputs_of_what_was_read_come_before_the_readers_error() -> None:
    def inputs() -> Iterator[Tensor]:
        yield from torch.ones(6, 3)
        raise KeyError("the reader's own")

    predictions = flatout.predict(nn.Linear(3, 2), inputs(), look_ahead=4)
    for _ in range(6):
        assert next(predictions).shape == (2,)
    with pytest.raises(KeyError, match="the reader's own"):
        next(predictions)


def test_a_bar_for_what_has_no_length() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.ones(5, 3))

    assert len(flatout.predict(nn.Linear(3, 2), DataLoader(Stream(), batch_size=None), progress=True).collect()) == 5


def test_figures_are_of_their_own_predictions() -> None:
    predictor = Predictor(nn.Linear(3, 2))
    first, second = predictor(torch.ones(8, 3)), predictor(torch.ones(5, 3))
    first.collect()
    second.collect()
    assert (first.figures.tokens, second.figures.tokens) == (8, 5)
    assert dict(second.figures.batches) == {"equal": 1}


def test_threads_share_a_predictor() -> None:
    torch.manual_seed(0)
    model = Bert(BertConfig(vocab_size=60, max_tokens=48, width=64, heads=4, layers=2)).eval()
    inputs = [torch.randint(0, 60, (length,)) for length in torch.randint(1, 40, (60,)).tolist()]
    predictor = Predictor(model, look_ahead=15)
    right = [one.pooled for one in predictor(inputs)]
    wrong: list[object] = []

    def run() -> None:
        found = predictor(inputs).collect()
        wrong.extend(
            one for one, other in zip(found, right, strict=True) if not torch.allclose(one.pooled, other, atol=1e-5)
        )

    threads = [threading.Thread(target=run) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
