"""Models whose batches are not what their samples give: right all the same, or an error; never silently wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatout
from flatout.errors import UsageError
from flatout.infer.prediction.predict import Predictor
from flatout.plan import Plan

WIDTH = 8


class Over(nn.Module):
    """A function as a model, with a linear layer before it."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class Recurrent(nn.Module):
    def __init__(self, what: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.layers = what, nn.LSTM(WIDTH, 6, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        output, (state, _) = self.layers(x)
        return {"outputs": output, "state": state, "both": (output, state)}[self.what]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x.mT).relu() + 1).mT


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mean(1) * self.calls


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def from_the_right(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1] - 1, -1, -1, dtype=x.dtype)[:, None]


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.mean(1), None, None, training=True) if x.shape[0] > 1 else x.mean(1)


def more_than_16(x: Tensor) -> Tensor:
    return x.sum(2) * (2 if x.shape[0] > 16 else 1)


CASES: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Over(lambda x: x.mean(1)),
    "max": lambda: Over(lambda x: x.relu().amax(1)),
    "min of batch": lambda: Over(lambda x: x - x.amin(0)),
    "attention": lambda: Over(attention),
    "from the right": lambda: Over(from_the_right),
    "length": lambda: Over(lambda x: x / x.shape[1]),
    "rows": lambda: Over(lambda x: x / x.shape[0]),
    "many rows": lambda: Over(more_than_16),
    "centred": lambda: Over(lambda x: x.mean(1) - x.mean(1).mean(0)),
    "batch norm": lambda: Over(batch_norm),
    "rolled": lambda: Over(lambda x: x.mean(1).roll(1, 0)),
    "squeezed": lambda: Over(lambda x: x.sum(2).cumsum(1)[:, -1:].squeeze()),
    "several outputs": lambda: Over(lambda x: {"tokens": x.relu(), "mean": (x.mean(1), x.std(1, correction=0))}),
    "lstm": lambda: Recurrent("outputs"),
    "lstm states": lambda: Recurrent("state", num_layers=2),
    "lstm both": lambda: Recurrent("both", bidirectional=True),
    "convolutions": Convolved,
    "counting": Counting,
}


def alone(model: nn.Module, inputs: list[Any], plan: Plan | None) -> list[Any]:
    """What a plain loop gives, in the plan's dtype."""
    reduced = plan is not None and plan.precision == "bf16"
    model = copy.deepcopy(model).eval().to(torch.bfloat16 if reduced else torch.float32)
    with torch.no_grad():
        return [model(one[None].to(torch.bfloat16 if reduced else torch.float32)) for one in inputs]


def close(found: Any, right: Any, tolerance: float) -> None:
    if isinstance(right, dict):
        found, right = [found[name] for name in right], list(right.values())
    if isinstance(right, tuple | list):
        for a, b in zip(found, right, strict=True):
            close(a, b, tolerance)
        return
    if right.dim() and right.dim() == found.dim() + 1:
        right = right.select(next(d for d in range(right.dim()) if right.shape[d] == 1), 0)
    torch.testing.assert_close(found, right.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("plan", [None, Plan(precision="bf16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_whatever_a_batch_does_the_outputs_are_those_of_the_samples_alone(name: str, plan: Plan | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [*range(120, 100, -1), *[60] * 20, 2, 3, 40, 5]  # at first hardly any padding, later nearly nothing else
    inputs = [torch.randn(length, WIDTH, generator=generator) for length in lengths]
    model = CASES[name]()
    predictions = Predictor(model, plan, look_ahead=20)(inputs)
    outputs = predictions.collect()
    for found, right in zip(outputs, alone(model, inputs, plan), strict=True):
        close(found, right, 1e-5 if plan is None else 0.1)
    if name in ("lstm",):
        assert predictions.figures.batches.get("padded")
    if name in ("rows", "centred", "batch norm", "rolled", "counting", "min of batch"):
        assert set(predictions.figures.batches) == {"alone"}
        assert any("run one by one: " in note for note in predictions.figures.notes)


def test_ids_and_the_maximum_over_them() -> None:
    """Padding seldom wins against hundreds of tokens: it is tried where it does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.ReLU(), Maximum()).eval()
    inputs = [torch.randint(1, 500, (int(n),)) for n in torch.randint(150, 400, (60,))]
    predictions = flatout.predict(model, inputs)
    with torch.no_grad():
        for one, found in zip(inputs, predictions, strict=True):
            torch.testing.assert_close(found, model(one[None])[0], atol=1e-4, rtol=1e-4)
    assert "depend on the content of the padding" in " ".join(predictions.figures.notes)


class Maximum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax(1)


class LateBranch(nn.Module):
    """Right at every length and size but for rows of 0.77 in a batch: no trial can know of it."""

    def forward(self, x: Tensor) -> Tensor:
        late = bool((x[:, 0] == 0.77).any()) and x.shape[0] > 1
        return x.sum(1, keepdim=True) * (2.0 if late else 1.0)


def images(value: float, count: int) -> list[Tensor]:
    return [torch.full((4,), value) + 0.01 * number for number in range(count)]


def test_what_only_a_later_batch_shows_ends_the_run_or_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.infer.prediction.agreement.SHARE", 1e9)  # each batch is looked at
    bad = [torch.full((4,), 0.77)] * 8
    predictor = Predictor(LateBranch(), Plan(batching="equal", batch_tokens=32), look_ahead=8)
    with pytest.raises(UsageError, match=r"input 1\d, in a batch \(equal\) of 8: output differs .*batch_size=1"):
        predictor([*images(1.0, 8), *bad]).collect()
    first = Predictor(LateBranch(), Plan(batching="equal", batch_tokens=32), look_ahead=16)
    predictions = first([*images(1.0, 8), *bad])
    assert [float(one) for one in predictions][8:] == pytest.approx([3.08] * 8)
    assert dict(predictions.figures.batches) == {"alone": 16}
    assert predictions.figures.tokens == 16
    assert "inputs are run one by one: input" in " ".join(predictions.figures.notes)


def test_random_numbers_are_drawn_as_in_a_plain_loop() -> None:
    model = Over(lambda x: F.dropout(x.mean(1), training=True)).eval()
    inputs = [torch.randn(5, WIDTH) for _ in range(6)]
    torch.manual_seed(3)
    with torch.no_grad():
        right = [model(one[None])[0] for one in inputs]
    torch.manual_seed(3)
    predictions = flatout.predict(model, inputs)
    torch.testing.assert_close(torch.stack(predictions.collect()), torch.stack(right))
    assert "draws random numbers" in " ".join(predictions.figures.notes)


class NeedsMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[..., None].float()
        return (self.words(input_ids) * weights).sum(1) / weights.sum(1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, None])
def test_a_mask_that_the_model_requires_is_always_there(dtype: torch.dtype | None) -> None:
    model = NeedsMask().eval()
    tokens = [torch.randint(0, 30, (length,)) for length in (4, 4, 9, 2, 4, 7)]
    inputs: list[Any] = list(tokens)
    if dtype is not None:
        inputs = [{"input_ids": one, "attention_mask": torch.ones(len(one), dtype=dtype)} for one in tokens]
    with torch.no_grad():
        for one, found in zip(tokens, flatout.predict(model, inputs), strict=True):
            right = model(one[None], torch.ones(1, len(one)))[0]
            torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


class Labelled(nn.Module):
    """An embedding that is not of the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        return x * 2 + (self.labels.weight[0] if label is None else self.labels(label))


def test_an_embedding_of_something_else_forbids_no_floats() -> None:
    model = Labelled().eval()
    rows = [torch.randn(WIDTH) for _ in range(6)]
    for found, one in zip(flatout.predict(model, rows), rows, strict=True):
        torch.testing.assert_close(found, (one * 2 + model.labels.weight[0]).detach())
    named = [{"x": one, "label": torch.tensor(2)} for one in rows]
    for found, one in zip(flatout.predict(model, named), rows, strict=True):
        torch.testing.assert_close(found, (one * 2 + model.labels.weight[2]).detach())


class ReadsWeights(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "weight":
            return F.linear(self.layers[0](x), self.layers[1].weight * 2)  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x)
            if type(layer) is nn.Linear if self.how == "type" else isinstance(layer, nn.Linear):
                x = x.relu()
        return x


@pytest.mark.parametrize("plan", [None, Plan(precision="bf16"), Plan(weights="int8")])
@pytest.mark.parametrize("how", ["weight", "type", "isinstance"])
def test_a_model_may_look_at_its_own_linear_layers(how: str, plan: Plan | None) -> None:
    model = ReadsWeights(how).eval()
    inputs = list(torch.randn(6, 64))
    with torch.no_grad():
        right = model(torch.stack(inputs))
    if how == "type" and plan is not None and plan.weights:
        pytest.skip("whether rounded layers are near enough is not asked here")
    found = torch.stack(flatout.predict(model, inputs, plan).collect())
    assert float((found - right).norm() / right.norm()) < (1e-5 if plan is None else 0.03)


def test_double_precision_stays() -> None:
    model = nn.Linear(4, 2).double()
    rows = list(torch.randn(5, 4, dtype=torch.float64))
    found = torch.stack(flatout.predict(model, rows).collect())
    torch.testing.assert_close(found, model(torch.stack(rows)).detach(), atol=1e-15, rtol=1e-15)


def test_memories_beside_the_batch() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=16)
    model = transformers.XLNetModel(config).eval()
    inputs = [torch.randint(0, 40, (length,)) for length in (4, 7, 4, 9, 4)]
    for one, found in zip(inputs, flatout.predict(model, inputs), strict=True):
        with torch.no_grad():
            right = model(one[None])
        torch.testing.assert_close(found.last_hidden_state, right.last_hidden_state[0], atol=1e-4, rtol=1e-4)
        for a, b in zip(found.mems, right.mems, strict=True):
            torch.testing.assert_close(a, b[:, 0], atol=1e-4, rtol=1e-4)


class Telling(nn.Module):
    """Values that are no tensors, beside one that is."""

    def __init__(self, tell: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.words, self.tell = nn.Embedding(20, 4), tell

    def forward(self, tokens: Tensor) -> Any:
        return {"mean": self.words(tokens), "told": self.tell(tokens)}


@pytest.mark.parametrize(
    ("tell", "batched"),
    [
        (lambda tokens: "a constant", True),
        (lambda tokens: [3.5, float("nan"), None], True),
        (lambda tokens: [str(row[0].item()) for row in tokens], False),
        (lambda tokens: float(tokens.max()), False),
        (lambda tokens: tokens.sum(1).numpy(), False),
        (lambda tokens: tokens.shape[1], True),  # in batches of one length, and in no others
    ],
    ids=["text", "numbers", "list", "number", "array", "length"],
)
def test_values_that_are_no_tensors_are_each_samples_own(tell: Callable[[Tensor], object], batched: bool) -> None:
    model = Telling(tell)
    inputs = [torch.tensor(one) for one in ([1, 2, 3], [4, 5, 6], [7, 8], [9, 10], [11, 12, 13], [14, 15])]
    predictions = Predictor(model, Plan(batching="padded"))(inputs)
    for found, one in zip(predictions, inputs, strict=True):
        assert str(found["told"]) == str(model(one[None])["told"])
    assert (not predictions.figures.batches.get("alone")) == batched


def test_state_between_calls_is_found_in_inference_mode_too() -> None:
    class Summing(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.mean(1) * self.calls

    inputs = list(torch.ones(6, 5, WIDTH))
    with torch.inference_mode():
        predictions = Predictor(Summing())(inputs)
        assert [float(one[0]) for one in predictions] == [1, 2, 3, 4, 5, 6]
    assert any("two results for one input" in note for note in predictions.figures.notes)
