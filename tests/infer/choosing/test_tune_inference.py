"""Choosing on real models. Whatever passes the guard is declared faster here, so that no test hangs on a clock."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flatout
from flatout.errors import UsageError
from flatout.infer.choosing import inference_search
from flatout.infer.choosing.inference_search import Turns
from flatout.infer.choosing.tune_inference import InferenceTuning
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.models import Bert, BertConfig, ResNet, ResNetConfig
from flatout.plan import read_plan, write_plan
from flatout.search import search
from flatout.statistics import compare_paired
from tests.infer.generation import tiny


@pytest.fixture(autouse=True)
def everything_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def declared(baseline: Any, candidate: Any, **_: Any) -> Turns:
        candidate()
        return Turns(comparison=compare_paired([2.0] * 8, [1.0] * 8), baseline_seconds=2.0, candidate_seconds=1.0)

    monkeypatch.setattr(inference_search, "in_turns", declared)
    monkeypatch.setattr(inference_search, "FAR_SLOWER", 1e9)
    monkeypatch.setattr(search, "payoff_steps", lambda *_: None)  # what a start costs is the machine's affair
    monkeypatch.setattr(inference_search.InferenceSearch, "_drop_redundant", lambda self: None)


class Mlp(nn.Module):
    """Scores of 4 classes. `outliers`: one input is a thousand times the others, and nothing depends on it alone."""

    def __init__(self, *, outliers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 4)
        self.register_buffer("scale", torch.ones(128))
        if outliers:
            self.scale[0] = 3000.0
            with torch.no_grad():
                self.up.weight[:, 0] = 0.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.down(torch.relu(self.up(x * self.scale)))}


def inputs(count: int = 120) -> list[torch.Tensor]:
    return list(torch.randn(count, 1, 1, 128, generator=torch.Generator().manual_seed(1)))


def tuned(model: nn.Module, sample: Any, **options: Any) -> InferenceTuning:
    return flatout.tune_inference(model, sample, **{"seconds": 60, "items": 1, **options})  # 1: nothing compiles


@functools.cache
def tuned_classifier() -> InferenceTuning:
    return tuned(Mlp(), inputs())


def by_label(found: InferenceTuning) -> dict[str, str]:
    not_tried = {entry.label: "not tried" for entry in found.state.not_tried}
    return not_tried | {trial.label: trial.outcome for trial in found.trials}


def test_a_classifier_keeps_what_is_near_enough() -> None:
    found = tuned_classifier()
    assert found.task == "predict"
    assert by_label(found)["bf16"] == "kept"
    assert by_label(found)["int8 weights and activations"] == "kept"
    assert by_label(found)["compile default"] == "not tried"
    assert found.plan.precision == "bf16"
    assert (found.plan.weights, found.plan.activations) == ("int8", "int8")
    assert found.plan.exactness == "reduced"
    assert found.plan.speedup == pytest.approx(2.0)
    assert found.accuracy.answers == 120
    assert 0 < found.accuracy.error < 0.05
    assert set(found.plan.reasons) == set(found.plan.choices())
    assert "agreement" in found.plan.reasons["precision"]


def test_the_guard_rejects_int8_activations_that_outliers_drown() -> None:
    found = tuned(Mlp(outliers=True), inputs())
    trial = next(one for one in found.trials if one.label == "int8 weights and activations")
    assert trial.outcome == "dropped"
    assert trial.reason.startswith("not near enough to fp32: agreement")
    assert by_label(found)["int8 weights"] == "kept"  # whose inputs are not rounded
    assert found.plan.activations is None


@pytest.mark.slow
def test_the_guard_rejects_int4_and_a_looser_bound_takes_it() -> None:
    model, prompts = tiny.model("own GPT-2"), tiny.prompts(4)
    strict = tuned(model, prompts, max_new_tokens=24)
    trial = next(one for one in strict.trials if one.label == "int4 weights")
    assert trial.outcome == "dropped"
    assert trial.accuracy is not None
    assert trial.accuracy.error > 0.05
    assert strict.plan.weights == "int8"
    loose = tuned(model, prompts, max_new_tokens=24, max_error=2.0, min_agreement=0.0, max_divergence=1e9)
    assert loose.plan.weights == "int4"
    assert by_label(loose)["int8 weights"] == "dropped"  # int4 took its place


def test_generation_is_guessed_said_and_its_plan_fits_the_generator() -> None:
    model = tiny.model("own GPT-2")
    found = tuned(model, tiny.prompts(3), max_new_tokens=8, min_agreement=0.9)
    assert found.task == "generate"
    assert "guessed" in found.task_reason
    assert found.unit == "prompt"
    assert found.accuracy.agreement is not None
    made = TokenGenerator(model, found.plan).generate([[1, 2, 3]], max_new_tokens=4)
    assert len(made.tokens[0]) <= 4


@pytest.mark.slow
def test_a_task_is_taken_as_asked() -> None:
    model = tiny.model("own GPT-2")
    scored = tuned(model, [torch.tensor(one) for one in tiny.prompts(3)], task="predict")
    assert (scored.task, scored.task_reason) == ("predict", "as asked")


def test_the_reference_is_the_models_own_greedy_text() -> None:
    """An int8 text may differ from fp32's from its third token on; the guard still reads fp32's."""
    model, prompts = tiny.model("own Transformer"), tiny.prompts(2)
    found = tuned(model, prompts, max_new_tokens=10)
    expected = sum(len(TokenGenerator(model).generate([one], max_new_tokens=10).tokens[0]) + 1 for one in prompts)
    assert found.plain_accuracy.answers == expected
    assert found.plain_accuracy.same_bits


def test_ragged_inputs_offer_batches() -> None:
    torch.manual_seed(0)
    model = Bert(BertConfig(vocab_size=50, width=32, heads=2, layers=1)).eval()
    sample = [torch.randint(0, 50, (n,)) for n in (3, 9, 5, 30, 12, 7)]
    found = tuned(model, sample, exactness="rounding")
    labels = by_label(found)
    assert {"padded batches", "equal batches"} <= set(labels)
    assert labels["bf16"] == "not tried"
    assert found.plan.exactness == "rounding"
    assert found.accuracy.agreement is None  # hidden states are no scores
    assert any("scores=True" in note for note in found.notes)


def test_images_offer_layout_and_folding() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(classes=10, stages=(1, 1), width=8)).eval()
    found = tuned(model, list(torch.randn(6, 3, 16, 16)), max_error=0.5, min_agreement=0.0)
    assert {"batch norms folded", "channels_last"} <= set(by_label(found))  # which helps here is for the machine to say
    assert any("fewer" in note or "at least 100" in note for note in found.notes)


def test_the_model_the_mode_and_the_random_state_stay() -> None:
    model = Mlp().train()
    model.extra = [1, 2]  # type: ignore[assignment]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    random.seed(5)
    state, python, threads = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    tuned(model, inputs(20))
    assert model.training
    assert model.up.training
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert torch.get_num_threads() == threads
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.up) is nn.Linear


def test_a_lever_that_raises_is_a_dropped_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.infer.prediction import placed

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel here")

    monkeypatch.setattr(placed, "Int8Linear", breaks)
    found = tuned(Mlp(), inputs(20))
    trial = next(one for one in found.trials if one.label == "int8 weights and activations")
    assert trial.outcome == "failed"
    assert "no such kernel here" in trial.reason
    assert by_label(found)["bf16"] == "kept"


def test_a_model_that_overflows_in_fewer_bits() -> None:
    class Sharp(Mlp):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = super().forward(x)["logits"]
            return {"logits": logits if logits.dtype is torch.float32 else logits / 0}

    found = tuned(Sharp(), inputs(20))
    trial = next(one for one in found.trials if one.label == "bf16")
    assert trial.reason == "not near enough to fp32: it gives inf or NaN where fp32 gives numbers"


def test_a_bf16_model_is_held_to_what_it_gives_itself() -> None:
    found = tuned(Mlp().to(torch.bfloat16), [one.to(torch.bfloat16) for one in inputs()])
    assert found.plain_accuracy.error > 0
    assert "bf16" not in by_label(found)
    assert by_label(found)["int8 weights and activations"] in ("kept", "dropped")


def test_the_plan_is_written_read_and_taken(tmp_path: Path) -> None:
    found = tuned_classifier()
    write_plan(tmp_path / "plan.toml", found.plan)
    again = read_plan(tmp_path / "plan.toml")
    assert again == found.plan
    assert again.machine_fingerprint == found.machine_fingerprint
    assert again.torch_version == torch.__version__
    outputs = flatout.predict(Mlp(), inputs(5), again).collect()
    assert outputs[0]["logits"].shape == (1, 1, 4)


def test_document_and_summary() -> None:
    found = tuned_classifier()
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["plan"]["precision"] == "bf16"
    assert {trial["outcome"] for trial in told["trials"]} <= {"kept", "dropped", "failed"}
    assert all(entry["reason"] for entry in told["not_tried"])
    text = found.summary()
    assert "precision = bf16" in text
    assert "x2.00 ±0.00" in text
    assert "not tried" in text


def test_an_iterator_and_progress() -> None:
    said: list[str] = []
    found = tuned(Mlp(), iter(inputs(10)), progress=said.append)
    assert found.sample.startswith("10 items")
    assert any("bf16" in line for line in said)


def test_one_bad_input_is_left_out() -> None:
    sample: list[Any] = [*inputs(10), "not a tensor"]
    assert tuned(Mlp(), sample).accuracy.answers == 10


def test_one_bad_prompt_is_named_and_changes_no_task() -> None:
    with pytest.raises(UsageError, match="prompt 3 holds token 5000 at place 1"):
        tuned(tiny.model("own GPT-2"), [*tiny.prompts(3), [1, 5000]])


def test_a_model_that_fails_in_fp32_is_said() -> None:
    class OnlyHalf(Mlp):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            if x.dtype is torch.float32:
                raise RuntimeError("not in fp32")
            return super().forward(x)

    with pytest.raises(UsageError, match="no sample input has an output in fp32: RuntimeError: not in fp32"):
        tuned(OnlyHalf().to(torch.bfloat16), inputs(5))


def bad() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"sample_inputs": []}, "there are no sample inputs"
    yield {"sample_inputs": 3}, "sample_inputs is int"
    yield {"sample_inputs": np.array(3.0)}, "sample_inputs is ndarray of a single number"
    yield {"sample_inputs": {"x": inputs(3)}}, "sample_inputs is a dict of 'x'"
    yield {"sample_inputs": DataLoader(inputs(4), batch_size=2)}, "which gives batches; .* pass its dataset"  # type: ignore[arg-type]
    yield {"max_new_tokens": "8"}, "max_new_tokens is '8'; it is a whole number"
    yield {"sample_inputs": ["a", "b"]}, "no sample input can be used"
    yield {"model": 3}, "model is 3"
    yield {"task": "train"}, "task is 'train'"
    yield {"items": 0}, "items is 0"
    yield {"exactness": "exact"}, "exactness is 'exact'"
    yield {"seconds": 0}, "seconds is 0"
    yield {"plan": "bf16"}, "plan is 'bf16'"
    yield {"max_error": -1}, "max_error is -1"
    yield {"task": "generate"}, "the Mlp gives torch.float32"
    yield {"scores": "classes"}, "scores is 'classes'; it is True, False or None"
    yield {"progress": 3}, "progress is 3; it is called with a line of text"


@pytest.mark.parametrize(("changed", "said"), list(bad()))
def test_what_cannot_be_used_is_said(changed: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": Mlp(), "sample_inputs": inputs(3), **changed}
    with pytest.raises(UsageError, match=said):
        flatout.tune_inference(arguments.pop("model"), arguments.pop("sample_inputs"), **arguments)


class Stopping:
    """A generation_config with a text that ends a text."""

    stop_strings: list[str] | None = None

    def __init__(self) -> None:
        self.stop_strings = None


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + one % 26) for one in ids)


def test_texts_that_end_a_text_do_not_end_what_is_timed() -> None:
    model = tiny.model("own GPT-2")
    model.generation_config = Stopping()
    model.generation_config.stop_strings = [chr(97 + one) for one in range(26)]
    found = tuned(model, tiny.prompts(2), max_new_tokens=4, tokenizer=Letters(), exactness="bit-identical")
    assert found.task == "generate"
    assert "4 new ones each" in found.sample
    assert found.accuracy.answers >= 8


def test_a_budget_that_the_first_runs_use_up_is_said_as_it_was_given() -> None:
    found = flatout.tune_inference(Mlp(), inputs(20), seconds=1e-3)
    assert found.trials == ()
    assert "not reached in the search's share of the budget of 1 ms" in found.summary()
