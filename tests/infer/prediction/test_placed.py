"""A private copy in other bits: linear layers as oneDNN holds them, in 8 and 4 bits; batch norms folded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import PlanError, UsageError
from flatout.infer.prediction import folding
from flatout.infer.prediction.folding import fold_batch_norms
from flatout.infer.prediction.linear import (
    Int8Linear,
    PackedLinear,
    RoundedLinear,
    multiplies_int8,
    packs,
    swap_linears,
    whole_number_products,
)
from flatout.infer.prediction.placed import check_bits, place, round_and_pack
from flatout.infer.prediction.predict import Predictor
from flatout.kernels.token_scales import ZERO_POINT
from flatout.plan import Plan


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 160, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "tolerance"), [("packed", 0.004), ("8 bits", 0.012), ("4 bits", 0.1), ("int8", 0.02)])
def test_linear_layers_in_other_forms(kind: str, tolerance: float, bias: bool, dtype: torch.dtype) -> None:
    if kind == "packed" and not packs(dtype):
        pytest.skip("oneDNN has no layout for it here")
    plain = layer(bias).to(dtype)
    make = {
        "packed": PackedLinear,
        "8 bits": lambda one: RoundedLinear(one, bits=8),
        "4 bits": lambda one: RoundedLinear(one, bits=4),
        "int8": Int8Linear,
    }
    x = torch.randn(3, 5, 96).to(dtype)
    right, found = plain(x).float(), make[kind](plain)(x)
    assert found.dtype is dtype
    assert found.shape == right.shape
    assert (found.float() - right).norm() <= tolerance * right.norm()


def test_without_instructions_for_it_8_bits_give_the_same() -> None:
    plain, x = layer(), torch.randn(7, 96)
    by_torch, here = Int8Linear(plain), Int8Linear(plain)
    if not here.onednn:
        pytest.skip("this processor multiplies no whole numbers")
    from flatout.precision.quantize import quantize_rows_int8

    by_torch.onednn, by_torch.values = False, quantize_rows_int8(plain.weight)[0]
    torch.testing.assert_close(by_torch(x), here(x))


def test_8_bit_inputs_with_nan_give_nan() -> None:
    x = torch.randn(2, 96)
    x[1, 3] = float("nan")
    y = Int8Linear(layer())(x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


def test_one_token_does_not_change_with_the_others() -> None:
    """A scale for each token: what shares the batch cannot be felt."""
    one, x = Int8Linear(layer()), torch.randn(4, 96)
    loud = x.clone()
    loud[1:] *= 1000
    assert torch.equal(one(x)[0], one(loud)[0])


def test_only_plain_layers_are_swapped() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(96, 96)
    hooked.register_forward_hook(lambda *_: None)
    shared = nn.Linear(96, 96)
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(96, 96),
            "own": Own(96, 96),
            "small": nn.Linear(4, 4),
            "hooked": hooked,
            "attention": nn.MultiheadAttention(96, 2),
            "fused": nn.TransformerEncoderLayer(96, 2, 96),
            "shared": shared,
            "again": shared,
        }
    )
    assert swap_linears(model, Int8Linear) == 2
    assert isinstance(model["plain"], Int8Linear)
    assert model["shared"] is model["again"]
    assert type(model["own"]) is Own


def test_weights_are_converted_in_the_copy_and_statistics_are_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 8))
    placed = place(model, Plan(precision="bf16", memory_format="channels_last"))
    assert placed.model[0].weight.dtype is torch.bfloat16  # type: ignore[index]
    assert placed.model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    assert placed.model[1].running_var.dtype is torch.float32  # type: ignore[index]
    assert not placed.model.training
    assert model.training
    assert placed.result_dtype is torch.float32
    mine = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}
    assert not mine & {one.data_ptr() for one in (*placed.model.parameters(), *placed.model.buffers())}


def test_tied_weights_stay_tied() -> None:
    words, head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    head.weight = words.weight
    copied = place(nn.ModuleList([words, head]), Plan(precision="bf16")).model
    assert copied[0].weight is copied[1].weight  # type: ignore[index]


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Linear(2, 2)
    model.file = (one for one in ())  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"cannot be copied: TypeError.*predict works on a copy"):
        place(model, Plan())


def test_contradictions_are_named() -> None:
    with pytest.raises(PlanError, match="activations is 'int8' while weights is 'int4'"):
        place(nn.Linear(2, 2), Plan(weights="int4", activations="int8"))


def test_groups_that_do_not_divide_are_left_and_said() -> None:
    placed = place(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 100), nn.Linear(100, 96)), Plan(weights="int4"))
    said = round_and_pack(placed, Plan(weights="int4"))
    assert [said] == ["2 linear layers hold int4 weights; 1 left, whose inputs are not a multiple of 32"]


class Branches(nn.Module):
    """A norm that may be folded, and three that may not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=number != 1) for number in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        for norm in self.norms:
            norm.running_mean.normal_()  # type: ignore[union-attr, operator]
            norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
            nn.init.normal_(norm.weight)  # type: ignore[arg-type]
            nn.init.normal_(norm.bias)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.convs[0](x)).relu()
        x = self.norms[1](self.convs[1](x)).relu()
        y = self.convs[2](x)
        x = self.norms[2](y) + y  # the convolution's output is needed as it is
        x = self.convs[3](x)
        return self.norms[3](self.norms[3](x.relu()))  # behind something else, and twice


def test_norms_are_folded_only_where_that_is_right() -> None:
    model, x = Branches().eval(), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        right = model(x)
        count, left, before = fold_batch_norms(model, lambda: model(x))
        assert (count, left) == (2, "2 left, which do not follow a plain convolution alone")
        assert torch.equal(before, right)  # type: ignore[arg-type]
        torch.testing.assert_close(model(x), right, atol=1e-4, rtol=1e-4)
    assert [type(norm) for norm in model.norms] == [nn.Identity, nn.Identity, nn.BatchNorm2d, nn.BatchNorm2d]
    assert not model.convs[0]._forward_hooks


class Returned(nn.Module):
    """A convolution whose output is returned too, or whose weight is another's, or is computed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.conv, self.norm, self.other = how, nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)
        self.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
        self.norm.running_var.uniform_(0.5, 3)  # type: ignore[union-attr, operator]
        self.other.weight = self.conv.weight
        wraps = {"spectral": nn.utils.spectral_norm, "parametrised": nn.utils.parametrizations.weight_norm}
        if how in wraps:
            self.conv = wraps[how](nn.Conv2d(3, 3, 3))
        if how == "hooked":
            self.conv.register_forward_hook(lambda _module, _inputs, output: output + 1)
        if how == "hooked norm":
            self.norm.register_forward_hook(lambda _module, _inputs, output: output * 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.conv(x)
        if self.how == "in place":
            found.relu_()
        if self.how == "listed":
            return self.norm(found), torch.tensor(found.tolist())
        return self.norm(found), found if self.how == "returned" else self.other(x)


@pytest.mark.parametrize(
    ("how", "folded"),
    [
        ("tied", 1),
        ("returned", 0),
        ("listed", 0),
        ("spectral", 0),
        ("parametrised", 0),
        ("hooked", 0),
        ("hooked norm", 0),
        ("in place", 0),
    ],
)
def test_a_convolution_that_is_more_than_a_convolution_stays(how: str, folded: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old spectral norm is deprecated
        model, x = Returned(how).eval(), torch.randn(4, 3, 8, 8)
        with torch.no_grad():
            right = [model(one[None]) for one in x]
            predictions = flatout.predict(model, x, Plan(fold_batch_norm=True))
            for found, expected in zip(predictions, right, strict=True):
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b[0], atol=1e-4, rtol=1e-3)
    assert f"{folded} batch norms folded into convolutions" in " ".join(predictions.figures.notes)


def test_a_fold_that_changes_the_outputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    fold = folding._fold

    def wrong(convolution: Any, norm: Any) -> None:
        fold(convolution, norm)
        convolution.bias.add_(1)

    monkeypatch.setattr(folding, "_fold", wrong)
    model, x = Branches().eval(), torch.randn(5, 4, 6, 6)
    predictor = Predictor(model, Plan(fold_batch_norm=True))
    found = predictor(x).collect()
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(found), model(x), atol=1e-5, rtol=1e-5)
    (note,) = (note for note in predictor.run.notes if "batch norms" in note)
    assert note.startswith("0 batch norms folded into convolutions; folded, output differs from")
    assert isinstance(predictor.run.runner.placed.model.norms[0], nn.BatchNorm2d)  # type: ignore[index]


def test_int8_is_known_from_the_processor() -> None:
    assert isinstance(multiplies_int8(), bool)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_in_few_bits_are_never_widened_on_a_gpu(bits: Any) -> None:
    plan = Plan(weights=bits)
    told = rf"the plan's weights is '{bits}' on cuda:0; only the CPU .* widen the whole matrix first; set activations"
    with pytest.raises(PlanError, match=told):
        check_bits(plan, torch.device("cuda", 0))
    check_bits(plan, torch.device("cpu"))
    check_bits(Plan(weights="int8", activations="int8"), torch.device("cuda", 0))


def test_layers_that_cuda_cannot_multiply_in_whole_numbers_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 65), nn.Linear(65, 64))
    placed = place(model, Plan())
    placed.device = torch.device("cuda", 0)  # what is done depends on it, and not on where the weights are
    told = round_and_pack(placed, Plan(weights="int8", activations="int8"))
    assert told == "1 linear layers multiply 8-bit inputs by 8-bit weights; 2 left, whose sizes are not multiples of 8"
    assert [type(layer) for layer in placed.model.children()] == [Int8Linear, nn.Linear, nn.Linear]


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_whole_numbers_are_multiplied_exactly_at_every_size(rows: int) -> None:
    if not multiplies_int8():
        pytest.skip("this processor's products of whole numbers may overflow midway, so they are not used")
    levels = torch.randint(0, 256, (rows, 32), dtype=torch.uint8)
    values = torch.randint(-127, 128, (24, 32), dtype=torch.int8)
    expected = (levels.int() - ZERO_POINT) @ values.int().T
    assert torch.equal(whole_number_products(levels, values), expected)


def test_8_bit_weights_in_fp16_do_not_pass_its_largest_number() -> None:
    plain = nn.Linear(512, 4)
    nn.init.constant_(plain.weight, 0.1)
    x = torch.ones(2, 512)
    found = RoundedLinear(plain.half(), bits=8)(x.half())
    torch.testing.assert_close(found.float(), plain.float()(x), rtol=0.01, atol=0.1)


class ReadsItself(nn.Module):
    """The weight of its linear layer is read by the model; `drawn`: a random number is added."""

    def __init__(self, *, drawn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drawn, self.conv, self.norm, self.linear = drawn, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 64)
        self.norm.running_mean.normal_()  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(self.norm(self.conv(x)).flatten(1), self.linear.weight)
        return y + torch.rand(()) if self.drawn else y


@pytest.mark.parametrize("drawn", [False, True])
def test_a_copy_that_is_made_anew_is_folded_where_that_was_shown_to_be_right(drawn: bool) -> None:
    if not packs(torch.float32):
        pytest.skip("oneDNN has no layout for it here")
    predictor = Predictor(ReadsItself(drawn=drawn).eval(), Plan(fold_batch_norm=True))
    predictor(torch.randn(5, 3, 8, 8)).collect()
    assert isinstance(predictor.run.runner.placed.model.norm, nn.BatchNorm2d if drawn else nn.Identity)
    notes = "; ".join(predictor.run.notes)
    assert ("batch norms were not folded: the outputs before and after could not be compared" in notes) is drawn
    assert ("1 batch norms folded into convolutions" in notes) is not drawn
    assert not any(note.startswith(";") for note in predictor.run.notes)
