"""Generation on a real GPU, where there is one: by CUDA graphs, against the same model on the CPU."""

import pytest
import torch

from flatout.infer.generation.token_generator import TokenGenerator
from flatout.models import GPT2, GPT2Config
from flatout.plan import Plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _model() -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocab_size=211, max_tokens=128, width=96, heads=4, layers=2)).eval()


def test_greedy_text_is_that_of_the_cpu() -> None:
    prompts = [[1, 2, 3], [4], list(range(5, 50))]
    network = _model()
    expected = TokenGenerator(network).generate(prompts, max_new_tokens=40)
    found = TokenGenerator(network.cuda(), slots=2).generate(prompts, max_new_tokens=40)
    assert found.engine == "CUDA graphs"
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("plan", [Plan(precision="bf16"), Plan(weights="int8"), Plan(weights="int4")])
def test_fewer_bits_and_sampling_run(plan: Plan) -> None:
    generator = TokenGenerator(_model().cuda(), plan)
    settings = {"max_new_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    assert generator.generate([[1, 2]], **settings).tokens == generator.generate([[1, 2]], **settings).tokens


def test_guesses_change_no_token() -> None:
    network = _model().cuda()
    prompt = [7, 8, 9, 10] * 8
    plain = TokenGenerator(network).generate([prompt], max_new_tokens=60)
    guessed = TokenGenerator(network, Plan(speculation="lookup")).generate([prompt], max_new_tokens=60)
    assert guessed.tokens == plain.tokens
