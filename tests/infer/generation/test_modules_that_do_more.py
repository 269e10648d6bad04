"""A model that does more than its weights say is run by its own forward pass, never read as if it did not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatout.errors import PlanError, UsageError
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.kernels.native import native
from flatout.models import GPT2
from flatout.plan import Plan
from tests.infer.generation.tiny import greedy, model


@pytest.fixture(scope="module")
def llama() -> Any:
    return model("llama")


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return model("own GPT-2")


class LoRALinear(nn.Linear):
    """As countless repositories have it: the base weight under its own name, and a second product."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.low, self.high = (
            nn.Parameter(torch.ones(2, base.in_features)),
            nn.Parameter(torch.ones(base.out_features, 2)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.low.T @ self.high.T


def _lora(network: Any) -> None:
    network.model.layers[1].self_attn.q_proj = LoRALinear(network.model.layers[1].self_attn.q_proj)


def _hook(network: Any) -> None:
    network.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made + 1)


def _pre_hook(network: Any) -> None:
    network.model.norm.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def _weight_norm(network: Any) -> None:
    nn.utils.parametrizations.weight_norm(network.lm_head)


def _old_weight_norm(network: Any) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(network.model.layers[0].mlp.up_proj)


def _own_forward(network: Any) -> None:
    network.model.layers[2].mlp.forward = lambda x: x


def _scaling(network: Any) -> None:
    network.model.layers[1].self_attn.scaling *= 2


def _epsilon(network: Any) -> None:
    network.model.layers[1].input_layernorm.variance_epsilon = 1e-3


def _extra_weight(network: Any) -> None:
    network.model.layers[1].steering = nn.Parameter(torch.ones(3))


def _quantised(network: Any) -> None:
    old = network.model.layers[0].mlp.up_proj.weight
    network.model.layers[0].mlp.up_proj.weight = nn.Parameter(old.detach().to(torch.int8), requires_grad=False)


def _derived(network: Any) -> None:
    network.__class__ = type("Mine", (type(network),), {"forward": lambda self, *a, **k: None})


def _same_name(network: Any) -> None:
    network.__class__ = type(type(network).__name__, (type(network),), {})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_lora, r"because model.layers.1.self_attn.q_proj \(LoRALinear\) is of the class tests\."),
        (_hook, r"because model.layers.0.mlp \(LlamaMLP\) has a forward hook"),
        (_pre_hook, r"because model.norm \(LlamaRMSNorm\) has a forward pre-hook"),
        (_weight_norm, r"because lm_head \(ParametrizedLinear\) has a parametrization"),
        (_old_weight_norm, r"because model.layers.0.mlp.up_proj \(Linear\) has a forward pre-hook"),
        (_own_forward, r"because model.layers.2.mlp \(LlamaMLP\) has a forward of its own"),
        (_scaling, r"because model.layers.1.self_attn.scaling is 0.5"),
        (_epsilon, r"because model.layers.1.input_layernorm.variance_epsilon is 0.001"),
        (_extra_weight, r"because the weight model.layers.1.steering was not expected"),
        (_same_name, r"because the model is a LlamaForCausalLM of tests|is of the class"),
    ],
)
def test_what_the_weights_do_not_say_is_computed_and_named(
    change: Callable[[Any], None], told: str, llama: Any
) -> None:
    network = copy.deepcopy(llama)
    change(network)
    made = TokenGenerator(network).generate([[1, 2, 3], [4]], max_new_tokens=5)
    assert re.search(told, made.engine)
    assert "over the whole text for each token, without a cache" in made.engine
    assert "its own generate() has a cache" in made.engine
    assert made.tokens == [greedy(network, prompt, 5) for prompt in ([1, 2, 3], [4])]
    with pytest.raises(PlanError, match=told.removeprefix("because ").split("|")[0]):
        TokenGenerator(network, Plan(weights="int8"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_quantised, r"the model fails on tokens \[1, 1\]: RuntimeError"),
        (_derived, r"the Mine gives a NoneType for tokens \[1, 1\]; generating needs logits \[1, 1, vocabulary\]"),
    ],
)
def test_a_model_that_cannot_run_by_itself_either(change: Callable[[Any], None], told: str, llama: Any) -> None:
    network = copy.deepcopy(llama)
    change(network)
    with pytest.raises(UsageError, match=told):
        TokenGenerator(network)


@pytest.mark.parametrize("plan", [Plan(), Plan(weights="int8"), Plan(weights="int4")], ids=["fp32", "int8", "int4"])
def test_a_class_that_was_patched_shows_in_the_logits(plan: Plan, gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be seen on the model: only what it computes tells."""
    from flatout.models.feed_forward import FeedForward

    plain = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: 1.2 * plain(self, x))
    told = "with the weights as they were read, the logits of a test prompt differ from the model's by .*%"
    with pytest.raises(UsageError, match=told):
        TokenGenerator(gpt2, plan)


def test_a_kernel_that_miscomputes_shows_too(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.infer.generation import native_decoder

    plain = native_decoder.run_pass
    monkeypatch.setattr(native_decoder, "run_pass", lambda *given: plain(*given).flip(-1))
    if native().library is None:
        pytest.skip(native().reason)
    with pytest.raises(UsageError, match="with the weights in int8, the logits of a test prompt differ"):
        TokenGenerator(gpt2, Plan(weights="int8"))


def test_the_check_leaves_the_model_and_the_generators_alone(gpt2: Any) -> None:
    network = copy.deepcopy(gpt2).train()
    network.blocks[0].eval()
    modes = [module.training for module in network.modules()]
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        TokenGenerator(network)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in network.modules()] == modes
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_precisions_pass(dtype: torch.dtype, gpt2: Any) -> None:
    network = copy.deepcopy(gpt2).to(dtype)
    assert len(TokenGenerator(network).generate([[1, 2]], max_new_tokens=3).tokens[0]) == 3


def test_a_model_of_two_positions() -> None:
    from flatout.models import GPT2Config

    tiny = GPT2(GPT2Config(vocab_size=11, max_tokens=2, width=8, heads=1, layers=1)).eval()
    assert TokenGenerator(tiny).generate([[1]], max_new_tokens=5).reasons == ["context"]


def test_a_derived_class_of_our_own_is_run_as_it_is() -> None:
    class Mine(GPT2):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return -super().forward(tokens)

    network = model("own GPT-2")
    network.__class__ = Mine
    made = TokenGenerator(network).generate([[1, 2, 3]], max_new_tokens=5)
    assert "because the model is a Mine of tests" in made.engine
    assert made.tokens == [greedy(network, [1, 2, 3], 5)]
