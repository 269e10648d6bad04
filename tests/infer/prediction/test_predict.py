"""predict: right results in order, bad inputs marked, memory that ends, the user's model as it was."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import flatout
from flatout.errors import MachineError, PlanError, UsageError
from flatout.infer.prediction import compiled
from flatout.infer.prediction.batching import Bounds, batches_of, bucket_length, windows
from flatout.infer.prediction.calling import Calling
from flatout.infer.prediction.predict import Predictor
from flatout.infer.prediction.predicted import Failed
from flatout.infer.prediction.samples import read_sample
from flatout.models import Bert, BertConfig, ResNet, ResNetConfig
from flatout.plan import Plan
from flatout.report.inference_text import predict_text
from tests.odd_defaults import odd_defaults

WORDS = 60


def bert() -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig(vocab_size=WORDS, max_tokens=48, width=64, heads=4, layers=2))


def ragged(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]


def alone(model: nn.Module, inputs: list[torch.Tensor]) -> list[Any]:
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        return [model(one[None]) for one in inputs]


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        (None, 1e-5),
        (Plan(batching="padded", batch_tokens=100), 1e-5),
        (Plan(batching="equal"), 1e-5),
        (Plan(precision="bf16", batch_tokens=128), 0.03),
        (Plan(weights="int8"), 0.03),
        (Plan(weights="int8", activations="int8"), 0.03),
        (Plan(weights="int4"), 0.2),
    ],
)
def test_every_plan_gives_what_the_samples_give_alone_in_order(plan: Plan | None, tolerance: float) -> None:
    model, inputs = bert(), ragged(60)
    predictions = flatout.predict(model, iter(inputs), plan, look_ahead=25)
    outputs = predictions.collect()
    assert len(outputs) == 60
    for found, right in zip(outputs, alone(model, inputs), strict=True):
        assert found.hidden.dtype is torch.float32
        assert found.hidden.shape == right.hidden[0].shape
        assert (found.hidden - right.hidden[0]).norm() <= tolerance * right.hidden.norm()
        assert (found.pooled - right.pooled[0]).norm() <= tolerance * right.pooled.norm()
    figures = predictions.figures
    assert figures.items == 60
    assert figures.tokens == sum(map(len, inputs))
    assert figures.padding_share <= (1 / 32 if plan is None or plan.batching is None else 0.5)
    assert figures.padding_share == 0 or plan is None or plan.batching != "equal"
    assert figures.flops is not None
    figures.to_json()


def test_the_users_model_stays_as_it_was() -> None:
    model = bert().train()
    model.blocks[0].eval()
    before = {name: (one.clone(), one.data_ptr(), one.dtype) for name, one in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    flatout.predict(model, ragged(5), Plan(precision="bf16")).collect()
    assert modes == [module.training for module in model.modules()]
    for name, one in model.state_dict().items():
        value, place, dtype = before[name]
        assert torch.equal(one, value)
        assert (one.data_ptr(), one.dtype) == (place, dtype)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_outputs_can_be_trained_on() -> None:
    (output,) = flatout.predict(bert(), ragged(1)).collect()
    probe = nn.Linear(64, 1)
    probe(output.pooled).sum().backward()
    assert probe.weight.grad is not None


def test_operations_are_those_of_real_tokens() -> None:
    """Known answer: the blocks' products are 24 w^2 a token, attention 4 w n a token, the pooler 2 w^2 a sample."""
    width, layers = 64, 2
    inputs = ragged(30)
    predictions = flatout.predict(bert(), inputs)
    predictions.collect()
    lengths = [len(one) for one in inputs]
    blocks = layers * sum(24 * width * width * n + 4 * width * n * n for n in lengths)
    assert predictions.figures.flops == pytest.approx(blocks + 2 * width * width * len(inputs), rel=0.02)


BAD: list[tuple[Any, str]] = [
    (None, "the input is None"),
    ([3, WORDS], f"token 1 is {WORDS}; ids are 0 to {WORDS - 1}"),
    ([-1], "token 0 is -1"),
    (torch.zeros(3), "torch.float32"),
    ([], "at least 1 token"),
    ("text", "tokenise"),
    (list(range(49)), "49 tokens; the model has positions for 48; cut it"),
    ({}, "empty dict"),
    (torch.ones(2, 3, dtype=torch.int64), ""),
]


def test_bad_inputs_are_marked_in_their_place() -> None:
    good = ragged(len(BAD) + 1)
    inputs = list(itertools.chain.from_iterable(zip(good, [bad for bad, _ in BAD], strict=False)))
    predictions = flatout.predict(bert(), inputs)
    outputs = predictions.collect()
    for place, (_, said) in enumerate(BAD):
        failed = outputs[2 * place + 1]
        assert isinstance(failed, Failed)
        assert failed.index == 2 * place + 1
        assert said in str(failed)
        assert not isinstance(outputs[2 * place], Failed)
    assert predictions.figures.failed == len(BAD)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.eye(4).to_sparse(), r"the input is a tensor of layout sparse_coo; .*; pass input.to_dense\(\)"),
        (torch.eye(4, device="meta"), "the input is on the meta device; predict computes with its values"),
    ],
)
def test_a_tensor_without_plain_values_is_marked(inputs: torch.Tensor, said: str) -> None:
    outputs = flatout.predict(nn.Linear(4, 3).eval(), inputs).collect()
    assert all(isinstance(one, Failed) and re.search(said, str(one)) for one in outputs)


@pytest.mark.parametrize(("returned", "what"), [(None, "None"), (3, "3"), ("logits", "'logits'")])
def test_a_model_that_returns_no_tensor_is_named(returned: object, what: str) -> None:
    """Each input would be given the same."""

    class Returns(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            super().forward(x)
            return returned

    outputs = flatout.predict(Returns(4, 3).eval(), torch.eye(4)).collect()
    assert all(isinstance(one, Failed) for one in outputs)
    assert f"the model returned {what}, without a tensor" in str(outputs[0])


def test_on_request_a_bad_input_ends_the_run() -> None:
    with pytest.raises(UsageError, match=r"^input 1: the input is None"):
        flatout.predict(bert(), [[1], None, [2]], on_error="raise").collect()


class Picky(nn.Module):
    """Refuses one value somewhere in the batch, and ends the memory beyond so many rows."""

    def __init__(self, rows: int = 1000) -> None:
        super().__init__()
        self.rows, self.scale = rows, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory (a stand-in)")
        if bool((x == 13).any()):
            raise ValueError("13 is not welcome")
        return x.float().sum(dim=tuple(range(1, x.dim()))) * self.scale


def test_a_sample_that_the_model_refuses_is_found_and_the_rest_goes_on() -> None:
    inputs = [torch.full((1, 2, 2), float(value)) for value in range(40)]
    outputs = flatout.predict(Picky(), inputs, batch_size=16).collect()
    assert str(outputs[13]) == "input 13: ValueError: 13 is not welcome"
    assert [float(one) for place, one in enumerate(outputs) if place != 13] == [4.0 * v for v in range(40) if v != 13]


def test_a_batch_that_does_not_fit_is_split_and_later_ones_are_smaller() -> None:
    inputs = [torch.full((1, 2, 2), float(value)) for value in range(20, 120)]
    predictor = Predictor(Picky(rows=5), batch_size=32)
    predictions = predictor(inputs)
    assert [float(one) for one in predictions] == [4.0 * v for v in range(20, 120)]
    splits = predictions.figures.splits
    assert splits == 3
    assert len(predictor(inputs).collect()) == 100
    assert predictor(inputs).figures.splits == 0


def test_where_ranks_share_the_model_a_batch_that_does_not_fit_ends_the_run() -> None:
    predictor = Predictor(Picky(rows=5), batch_size=32)
    predictor.run.runner.placed.ranks = cast("Any", "others, which do not split it")
    with pytest.raises(MachineError, match=r"memory ran out on a rank, in a batch of 32: .*use a smaller batch_size"):
        predictor([torch.full((1, 2, 2), float(value)) for value in range(20, 120)]).collect()


def test_a_sample_too_large_alone_is_marked() -> None:
    outputs = flatout.predict(Picky(rows=0), [torch.ones(1, 2, 2)] * 3).collect()
    assert all(isinstance(one, Failed) and "give the run more memory" in one.remedy for one in outputs)


def test_a_model_that_always_fails_is_an_error() -> None:
    with pytest.raises(UsageError, match="failed on each of the first 16 inputs: ValueError: 13"):
        flatout.predict(Picky(), [torch.full((1, 2, 2), 13.0)] * 40).collect()


def test_values_that_are_not_finite_are_found_on_request() -> None:
    inputs = [torch.ones(1, 2, 2), torch.full((1, 2, 2), float("nan"))]
    assert not any(isinstance(one, Failed) for one in flatout.predict(Picky(), inputs))
    one, other = flatout.predict(Picky(), inputs, check_finite=True)
    assert float(one) == 4
    assert "1 of 1 values that are inf or NaN" in str(other)


def test_nothing_in_nothing_out() -> None:
    predictions = flatout.predict(bert(), [])
    assert predictions.collect() == []
    assert predictions.figures.items == 0
    assert predictions.figures.share_of_ceiling is None


def test_the_input_is_read_no_further_than_the_window() -> None:
    read = 0

    def inputs() -> Iterator[torch.Tensor]:
        nonlocal read
        for one in ragged(200):
            read += 1
            yield one

    predictions = flatout.predict(bert(), inputs(), look_ahead=16)
    next(predictions)
    assert read == 16
    assert len(predictions.collect()) == 199


def test_dicts_and_tuples_of_several_inputs() -> None:
    model, tokens = bert(), ragged(12)
    types = [torch.zeros_like(one) for one in tokens]
    for one in types:
        one[::2] = 1
    by_name = flatout.predict(model, [{"tokens": a, "token_types": b} for a, b in zip(tokens, types, strict=True)])
    by_place = flatout.predict(model, list(zip(tokens, types, strict=True)))
    model.eval()
    for a, b, one, other in zip(tokens, types, by_name, by_place, strict=True):
        with torch.no_grad():
            right = model(a[None], b[None]).pooled[0]
        torch.testing.assert_close(one.pooled, right, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(other.pooled, right, atol=1e-5, rtol=1e-4)


def test_images_are_batched_by_count() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(classes=5, stages=(1, 1), width=8, zero_init_residual=False)).eval()
    images = torch.randn(7, 3, 32, 32)
    plan = Plan(memory_format="channels_last", fold_batch_norm=True)
    predictions = flatout.predict(model, images, plan, batch_size=3)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(predictions.collect()), model(images), atol=1e-4, rtol=1e-3)
    assert dict(predictions.figures.batches) == {"equal": 3}
    assert "9 batch norms folded into convolutions" in predictions.figures.notes


def test_map_style_datasets_and_images_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(5, 3, 16, 16)
    outputs = flatout.predict(model, torch.utils.data.TensorDataset(images), batch_size=2).collect()
    with torch.no_grad():
        right = model(pixel_values=images).logits
    torch.testing.assert_close(torch.stack([one.logits for one in outputs]), right, atol=1e-5, rtol=1e-4)
    named = flatout.predict(model, [{"pixel_values": one} for one in images])
    torch.testing.assert_close(torch.stack([one["logits"] for one in named]), right, atol=1e-5, rtol=1e-4)


def test_images_are_read_two_batches_ahead() -> None:
    read = []
    predictions = flatout.predict(Picky(), (read.append(n) or torch.ones(3, 4, 4) for n in range(100)), batch_size=4)
    next(predictions)
    assert len(read) == 8


def compiled_case() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.slow
def test_compiled_shapes_are_few_and_past_the_bound_it_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpp_compiler_there():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr("flatout.infer.prediction.compiled.MOST_VERSIONS", 1)
    model = compiled_case()
    inputs = [torch.randn(length, 8) for length in (5, 6, 7, 3, 8, 20, 18, 5, 17, 30)]
    predictor = Predictor(model, Plan(compile="default", batch_tokens=32, batching="padded"))
    for _ in range(2):
        predictions = predictor(inputs)
        for found, right in zip(predictions, alone(model, inputs), strict=True):
            torch.testing.assert_close(found, right[0], atol=1e-5, rtol=1e-4)
    assert predictor.run.compiled is not None
    assert predictor.run.compiled.versions == 2, predictions.figures.notes
    assert any("went on without torch.compile: 2 versions" in note for note in predictions.figures.notes)


@pytest.mark.parametrize(("device", "expected"), [("cpu", [(3, 8), (4, 8)]), ("cuda", [])])
def test_kernels_are_built_quickly_once_per_shape(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: list[tuple[int, int]]
) -> None:
    built: list[tuple[int, ...]] = []

    @contextlib.contextmanager
    def in_our_cache() -> Iterator[None]:
        built.append(tuple(inputs.shape))
        yield

    @contextlib.contextmanager
    def no_headers() -> Iterator[Callable[[], None]]:
        yield lambda: None

    monkeypatch.setattr(compiled, "compiler_is_there", lambda: True)
    monkeypatch.setattr(compiled, "in_our_cache", in_our_cache)
    monkeypatch.setattr(compiled, "headers_precompiled_meanwhile", no_headers)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    call = compiled.CompiledModel(compiled_case(), "default", device=device)
    for rows in (3, 4, 3, 4):
        inputs = torch.randn(rows, 8)
        call(inputs)
    assert built == expected


def cpp_compiler_there() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: flatout.predict("model", []), UsageError, "model is 'model'; it is a torch"),  # type: ignore[arg-type]
        (lambda: flatout.predict(bert(), 3), UsageError, "inputs is int"),  # type: ignore[arg-type]
        (lambda: flatout.predict(bert(), "abc"), UsageError, "inputs is str"),
        (lambda: flatout.predict(bert(), torch.tensor(3.0)), UsageError, "inputs is Tensor of a single number"),
        (lambda: flatout.predict(bert(), np.array(3.0)), UsageError, "inputs is ndarray of a single number"),
        (lambda: flatout.predict(bert(), {"tokens": [[1, 2]]}), UsageError, "inputs is a dict of 'tokens'"),
        (lambda: flatout.predict(bert(), torch.utils.data.DataLoader(ragged(3))), UsageError, "pass its dataset"),  # type: ignore[arg-type]
        (lambda: flatout.predict(bert(), [], {"precision": "bf16"}), UsageError, "flatout.Plan or None"),  # type: ignore[arg-type]
        (lambda: flatout.predict(bert(), [], batch_size=0), UsageError, "batch_size is 0"),
        (lambda: flatout.predict(bert(), [], device="cuda:99"), UsageError, "torch sees cpu.*; see which"),
        (lambda: flatout.predict(bert(), [], device="gpu0"), UsageError, "device is 'gpu0'"),
        (lambda: flatout.predict(bert(), [], on_error="no"), UsageError, "'mark' or 'raise'"),
        (lambda: flatout.predict(bert(), [], Plan(activations="int8")), PlanError, "set weights = 'int8'"),
        (lambda: flatout.predict(bert(), [], Plan(speculation="lookup")), PlanError, "generate would"),
    ],
)
def test_what_cannot_be_used_is_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 200), st.integers(1, 9), st.booleans())
def test_batches_hold_every_sample_within_the_budget(lengths: list[int], most: int, size: int, padded: bool) -> None:
    found = batches_of(lengths, lambda n: n, max_tokens=most, max_size=size, padded=padded)
    assert sorted(itertools.chain.from_iterable(found)) == sorted(lengths)
    for batch in found:
        tokens = max(batch) * len(batch) if padded else sum(batch)
        assert len(batch) <= size
        assert tokens <= most or len(batch) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 100), st.integers(1, 9))
def test_windows_are_bounded_and_in_order(tokens: list[int], most: int, items: int) -> None:
    bounds = Bounds(batch_tokens=1, batch_size=1, window_tokens=most, window_items=items)
    found = list(windows(iter(tokens), lambda n: n, bounds))
    assert list(itertools.chain.from_iterable(found)) == tokens
    assert all(len(window) <= items and sum(window[:-1]) < most for window in found)


def test_buckets_are_few() -> None:
    lengths = {bucket_length(length) for length in range(1, 513)}
    assert len(lengths) == 13
    assert all(bucket_length(length) >= length for length in range(1, 513))


@pytest.mark.parametrize(
    ("model", "inputs", "sequences"),
    [
        (nn.Linear(8, 2), [torch.randn(8) for _ in range(4)], False),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), [torch.randn(3, 6, 6) for _ in range(4)], False),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), [torch.tensor([1, 2]), torch.tensor([3])], True),
    ],
    ids=["vectors", "images", "ids"],
)
def test_tokens_are_counted_a_second_only_where_there_are_some(
    model: nn.Module, inputs: list[torch.Tensor], sequences: bool
) -> None:
    predictions = Predictor(model)(inputs)
    predictions.collect()
    figures = predictions.figures
    assert (figures.tokens_per_second is not None) == sequences
    assert ("tokens/s" in figures.in_short()) == sequences
    said = predict_text(figures, out="out", done_before=0, failed=0)
    assert "inputs/s" in said
    assert ("tokens/s" in said) == sequences


def test_what_the_user_set_for_new_tensors_changes_nothing() -> None:
    model, inputs = bert(), [one.tolist() for one in ragged(12)]
    for plan in (Plan(), Plan(batching="padded"), Plan(weights="int8"), Plan(weights="int8", activations="int8")):
        expected = flatout.predict(model, inputs, plan).collect()
        with odd_defaults():
            found = flatout.predict(model, inputs, plan).collect()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.hidden, other.hidden)


@pytest.mark.parametrize(("width", "batch_size", "batches"), [(8, 3, 4), (8, None, 1), (3000, None, 1), (3000, 3, 4)])
def test_vectors_of_numbers_are_batched_by_count(width: int, batch_size: int | None, batches: int) -> None:
    model, vectors = nn.Linear(width, 2), list(torch.randn(10, width))
    predictions = Predictor(model, batch_size=batch_size)(vectors)
    torch.testing.assert_close(torch.stack(predictions.collect()), model(torch.stack(vectors)), atol=1e-5, rtol=1e-4)
    assert dict(predictions.figures.batches) == {"equal": batches}


def test_a_vector_has_a_length_where_the_model_takes_a_mask() -> None:
    sound = torch.randn(50)
    assert read_sample(0, sound, Calling()).length is None
    assert read_sample(0, sound, Calling(mask_name="attention_mask")).length == 50
    assert read_sample(0, {"ids": [1, 2, 3], "weights": [0.5, 0.5, 0.5]}, Calling()).length == 3


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_an_iterator_may_refill_what_it_yields(kind: str) -> None:
    buffer = torch.zeros(1, 2, 2)

    def inputs() -> Iterator[Any]:
        for value in range(6):
            buffer.fill_(value)
            yield buffer if kind == "tensor" else buffer.numpy()

    assert [float(one) for one in flatout.predict(Picky(), inputs())] == [4.0 * value for value in range(6)]


def test_a_gpu_that_failed_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses everything from then on, so no later input is at fault."""
    said = "AcceleratorError: CUDA error: device-side assert triggered"
    monkeypatch.setattr("flatout.infer.prediction.window_run.broken_device", lambda device: said)
    inputs = [torch.full((1, 2, 2), float(value)) for value in (1, 2, 13)]
    predictions = flatout.predict(Picky(), inputs, look_ahead=1)
    assert [float(next(predictions)) for _ in range(2)] == [4.0, 8.0]
    with pytest.raises(MachineError, match=r"the GPU failed on inputs \[2\], or just before: Accel.*BLOCKING"):
        next(predictions)


def test_counts_may_be_numpys() -> None:
    predictor = Predictor(nn.Linear(8, 2), batch_size=np.int64(2), look_ahead=np.int32(4))  # type: ignore[arg-type]
    predictions = predictor(list(torch.randn(6, 8)))
    assert len(predictions.collect()) == 6
    json.dumps(predictions.figures.to_json())


def test_speech_goes_into_an_encoder_that_has_no_vocabulary() -> None:
    """Whisper's embeddings are of its decoder's ids, and its first input is audio."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"d_model": 16, "max_source_positions": 10, "max_target_positions": 12, "num_mel_bins": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads"), 2
    )
    config = transformers.WhisperConfig(vocab_size=WORDS, **sizes, **ids, **layers)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = [{"input_features": torch.randn(4, 20), "decoder_input_ids": torch.tensor([1, 5, 7])} for _ in range(5)]
    for found, one in zip(flatout.predict(model, inputs), inputs, strict=True):
        alone = model(**{name: part[None] for name, part in one.items()})
        torch.testing.assert_close(found["logits"], alone.logits[0].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_results_under_way_are_not_copied(copied: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match=r"Predictions cannot be copied or pickled; .* predictions\.collect"):
        copied(flatout.predict(nn.Linear(3, 2), [torch.ones(3)]))
