"""An LSTM's gradients under autocast on a CPU are those of its dtype, or it runs in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import flatout
from flatout.precision import recurrent
from flatout.precision.recurrent import gradient_error, lstm_gradients_right


def gradients(layer: nn.LSTM, x: torch.Tensor, *, autocast: bool) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, _ = layer(x)
    (output.float() ** 2).sum().backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None)]


class Tagger(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, hidden, batch_first=True), nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize(("inputs", "hidden"), [(8, 16), (16, 1024)])
def test_gradients_of_a_layer_are_right(inputs: int, hidden: int) -> None:
    """With 1,024 units oneDNN's are not, on a processor with AMX."""
    layer = nn.LSTM(inputs, hidden, batch_first=True)
    x = torch.randn(3, 5, inputs)
    exact = gradients(layer, x, autocast=False)
    with lstm_gradients_right():
        found = gradients(layer, x, autocast=True)
    for ours, theirs in zip(found, exact, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.05


def test_what_is_tried_draws_no_random_numbers_and_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient_error.cache_clear()
    before = torch.get_rng_state()
    first = gradient_error(8, 16, torch.bfloat16)
    assert first > 0
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(recurrent, "_input_gradient", None)
    assert gradient_error(8, 16, torch.bfloat16) == first


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "gradient_error", lambda *_: 1.0)


@pytest.mark.parametrize("pair", [None, tuple, list])
def test_a_wrong_layer_runs_in_fp32(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    layer, x = nn.LSTM(4, 8), torch.randn(3, 2, 4).bfloat16()
    given = None if pair is None else pair((torch.zeros(1, 2, 8).bfloat16(), torch.zeros(1, 2, 8)))
    with lstm_gradients_right(), torch.autocast("cpu", torch.bfloat16):
        output, (hidden, _) = layer(x, given)
        assert output.dtype == hidden.dtype == torch.float32
        with torch.no_grad():  # forward alone is right
            assert layer(x)[0].dtype == torch.bfloat16
    assert torch.equal(output, layer(x.float())[0])


def test_packed_sequences_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    layer = nn.LSTM(4, 8)
    packed = pack_padded_sequence(torch.randn(3, 2, 4).bfloat16(), torch.tensor([3, 2]))
    with lstm_gradients_right(), torch.autocast("cpu", torch.bfloat16):
        output, lengths = pad_packed_sequence(layer(packed)[0])
    assert (output.dtype, lengths.tolist()) == (torch.float32, [3, 2])


def test_what_is_no_tensor_is_refused_by_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    with (
        lstm_gradients_right(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(AttributeError, match="'int' object has no attribute 'dim'"),
    ):
        nn.LSTM(4, 8)(3)


def test_a_layer_that_is_checkpointed_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is no part of the forward pass that is computed again."""
    gradient_error.cache_clear()
    layer, x = nn.LSTM(4, 8), torch.randn(3, 2, 4, requires_grad=True)
    with lstm_gradients_right():
        with torch.autocast("cpu", torch.bfloat16):
            output = checkpoint(lambda value: layer(value)[0], x, use_reentrant=False)
        output.float().sum().backward()
    assert x.grad is not None
    assert gradient_error.cache_info().misses == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.15's own, of what follows the layer
def test_what_is_tried_is_not_compiled() -> None:
    """Compiled, it would be right where the layer is not."""
    torch.manual_seed(0)
    model, x = Tagger(1024), torch.randn(4, 5, 8)
    found = []
    gradient_error.cache_clear()
    with lstm_gradients_right():
        for call, autocast in ((torch.compile(model, backend="aot_eager"), True), (model, False)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = call(x)
            (output.float() ** 2).sum().backward()
            assert model.lstm.weight_ih_l0.grad is not None
            found.append(model.lstm.weight_ih_l0.grad.clone())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.05
    tried = gradient_error(8, 1024, torch.bfloat16)
    gradient_error.cache_clear()
    assert gradient_error(8, 1024, torch.bfloat16) == pytest.approx(tried, rel=0.1)


def test_without_autocast_and_afterwards_it_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    layer, x, original = nn.LSTM(4, 8), torch.randn(3, 2, 4), nn.LSTM.forward
    with lstm_gradients_right():
        assert layer(x.double().float())[0].dtype == torch.float32
    assert nn.LSTM.forward is original


def test_a_step_in_bf16_has_the_gradients_of_one_in_fp32() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5, 8), torch.randint(3, (4, 5))
    found = []
    for precision in ("fp32", "bf16"):
        torch.manual_seed(1)
        model = Tagger(1024)
        step = flatout.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
            flatout.Plan(precision=precision),
        )
        before = model.lstm.weight_ih_l0.detach().clone()
        step((x, y))
        found.append(model.lstm.weight_ih_l0.detach() - before)
        step.close()
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.05


def test_inputs_are_given_by_torchs_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, states = nn.LSTM(4, 8), torch.randn(3, 2, 4), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    with lstm_gradients_right():
        assert torch.equal(layer(input=x, hx=states)[0], layer(x, states)[0])
        wrong(monkeypatch)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(input=x, hx=states)[0].dtype == torch.float32
