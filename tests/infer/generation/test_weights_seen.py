"""A text is that of the model as it is: whatever changed since it was prepared is noticed, and what did not is kept."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flatout
from flatout.errors import UsageError
from flatout.infer.generation import prepared as prepared_module
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.models import CharacterGenerator, CharacterGeneratorConfig
from flatout.plan import Plan
from tests.infer.generation.tiny import greedy, model

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def original() -> Any:
    return model("own GPT-2")


@pytest.fixture
def network(original: Any) -> Any:
    return copy.deepcopy(original)


@pytest.fixture(scope="module")
def other() -> Any:
    torch.manual_seed(99)
    made = model("own GPT-2")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return made


def _load(network: Any, other: Any) -> None:
    network.load_state_dict(other.state_dict())


def _assign(network: Any, other: Any) -> None:
    network.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    network.head.weight = network.tokens.weight


def _train(network: Any, other: Any) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    network(torch.tensor([PROMPT])).square().mean().backward()
    optimizer.step()


def _data(network: Any, other: Any) -> None:
    for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()


def _data_in_place(network: Any, other: Any) -> None:
    for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)


def _one_row(network: Any, other: Any) -> None:
    network.head.weight.data[greedy(network, PROMPT, 1)[0]] = 0.0


def _one_column(network: Any, other: Any) -> None:
    network.blocks[0].feed_forward.up.weight.detach().numpy()[:, 3] = 2.0


def _a_layer(network: Any, other: Any) -> None:
    network.blocks[1] = copy.deepcopy(other.blocks[1])


CHANGES = [_load, _assign, _train, _data, _data_in_place, _one_row, _one_column, _a_layer]


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_text_is_that_of_the_changed_model(
    change: Callable[[Any, Any], None], weights: Any, network: Any, other: Any
) -> None:
    generator = TokenGenerator(network, Plan(weights=weights))
    generator.generate([PROMPT], max_new_tokens=10)
    flatout.generate(network, [PROMPT], max_new_tokens=10, plan=Plan(weights=weights))
    change(network, other)
    if weights is None:
        expected = greedy(network, PROMPT, 10)
    else:
        expected = TokenGenerator(network, Plan(weights=weights)).generate([PROMPT], max_new_tokens=10).tokens[0]
    assert generator.generate([PROMPT], max_new_tokens=10).tokens == [expected]
    found = flatout.generate(network, [PROMPT], max_new_tokens=10, plan=Plan(weights=weights))
    assert found.tokens == [expected]


def test_a_hook_or_attribute_that_comes_later_is_noticed(network: Any) -> None:
    generator = TokenGenerator(network)
    handle = network.norm.register_forward_hook(lambda module, given, made: made + 1)
    made = generator.generate([PROMPT], max_new_tokens=4)
    assert "because norm (LayerNorm) has a forward hook" in made.engine
    assert made.tokens == [greedy(network, PROMPT, 4)]
    handle.remove()
    assert "forward pass" not in generator.generate([PROMPT], max_new_tokens=2).engine
    network.blocks[0].norm1.eps = 0.5
    assert "because blocks.0.norm1.eps is 0.5" in generator.generate([PROMPT], max_new_tokens=2).engine


def test_weights_that_change_within_a_text_end_it(network: Any, other: Any) -> None:
    stream = TokenGenerator(network).stream([PROMPT], max_new_tokens=10)
    next(stream)
    _load(network, other)
    with pytest.raises(UsageError, match=r"the model's weights changed while a text was made; .*deepcopy"):
        list(stream)


def test_a_draft_that_changed_is_prepared_anew(network: Any, other: Any) -> None:
    generator = TokenGenerator(network, draft=(draft := copy.deepcopy(network)))
    assert generator._draft is not None
    first = generator._draft
    _load(draft, other)
    assert generator.generate([PROMPT], max_new_tokens=10).tokens == [greedy(network, PROMPT, 10)]
    assert generator._draft is not first


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Each time something was prepared, under which plan."""
    found: list[Plan] = []
    plain = prepared_module._engine

    def counted(network: Any, plan: Plan) -> Any:
        found.append(plan)
        return plain(network, plan)

    monkeypatch.setattr(prepared_module, "_engine", counted)
    return found


def test_what_was_prepared_is_kept_for_the_next_call(network: Any, preparations: list[Plan]) -> None:
    plan = Plan(weights="int8")
    texts = [flatout.generate(network, [PROMPT], max_new_tokens=4, plan=plan).tokens for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert len(preparations) == 1
    flatout.generate(network, [PROMPT], max_new_tokens=4, temperature=0.5, stop=[7], plan=plan)
    assert len(preparations) == 1, "settings of a text need no other weights"
    flatout.generate(network, [PROMPT], max_new_tokens=4)
    assert [one.weights for one in preparations] == ["int8", None]


def test_a_nan_weight_is_the_same_the_next_time(network: Any, preparations: list[Plan]) -> None:
    with torch.no_grad():
        network.positions.weight[100:] = float("nan")  # never read by so short a text
    for _ in range(2):
        flatout.generate(network, [PROMPT], max_new_tokens=4)
    assert len(preparations) == 1


def test_what_was_kept_goes_with_the_model(network: Any) -> None:
    alone = copy.deepcopy(network)
    flatout.generate(alone, [PROMPT], max_new_tokens=4, plan=Plan(weights="int8"))
    engine = weakref.ref(prepared_module._KEPT[alone][1].engine)
    held = weakref.ref(alone)
    del alone
    gc.collect()
    assert held() is None
    assert engine() is None


def test_what_was_kept_of_a_model_run_by_itself_goes_too() -> None:
    alone = CharacterGenerator(CharacterGeneratorConfig(vocab_size=9, embedding_width=4, hidden_width=4)).eval()
    flatout.generate(alone, [[1]], max_new_tokens=2)
    engine, held = weakref.ref(prepared_module._KEPT[alone][1].engine), weakref.ref(alone)
    del alone
    gc.collect()
    assert (held(), engine()) == (None, None)
