"""Generation on a real GPU, where there is one: by CUDA graphs, against the same model on the CPU."""

from typing import Any

import pytest
import torch

from flatout.errors import PlanError
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


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_fewer_bits_are_refused_where_no_kernel_reads_them(bits: Any) -> None:
    with pytest.raises(PlanError, match="widen the whole matrix"):
        TokenGenerator(_model().cuda(), Plan(weights=bits))


def test_half_precision_and_sampling_run() -> None:
    generator = TokenGenerator(_model().cuda(), Plan(precision="bf16"))
    settings = {"max_new_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    assert generator.generate([[1, 2]], **settings).tokens == generator.generate([[1, 2]], **settings).tokens


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_another_gpu_than_the_current_one() -> None:
    network = _model()
    expected = TokenGenerator(network).generate([[1, 2, 3]], max_new_tokens=10)
    for device in ("cuda:0", "cuda:1", "cuda:0"):  # torch keeps one stream for captures, on the GPU of the first
        found = TokenGenerator(network.to(device)).generate([[1, 2, 3]], max_new_tokens=10)
        assert found.tokens == expected.tokens
        assert torch.cuda.current_device() == 0


def test_guesses_change_no_token() -> None:
    network = _model().cuda()
    prompt = [7, 8, 9, 10] * 8
    plain = TokenGenerator(network).generate([prompt], max_new_tokens=60)
    guessed = TokenGenerator(network, Plan(speculation="lookup")).generate([prompt], max_new_tokens=60)
    assert guessed.tokens == plain.tokens
