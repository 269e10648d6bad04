"""Small causal models of every family, with weights large enough that their texts differ from token to token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.models import GPT2, GPT2Config, TransformerConfig, TransformerLM

VOCABULARY = 211
CONTEXT = 128
FAMILIES = ["own GPT-2", "own Transformer", "gpt2", "llama", "qwen2", "qwen3", "mistral"]
END = 5


def model(family: str) -> Any:
    """In evaluation mode; those of transformers only where that is installed."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "max_tokens": CONTEXT, "width": 48, "heads": 3, "layers": 2}
    if family == "own GPT-2":
        return _lively(GPT2(GPT2Config(**sizes)))
    if family == "own Transformer":
        return _lively(TransformerLM(TransformerConfig(**sizes)))
    transformers = pytest.importorskip("transformers")
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": END,
        "initializer_range": 0.2,
    }
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=96, n_head=4, n_positions=CONTEXT, **shared)
        return transformers.GPT2LMHeadModel(config).eval()
    shared |= {
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **shared,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            )
        ),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**shared, use_sliding_window=True, sliding_window=20, max_window_layers=1)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shared, head_dim=24)),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**shared, sliding_window=17)),
    }
    return made[family]().eval()


def _lively(network: nn.Module) -> nn.Module:
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return network.eval()


def logits(network: Any, tokens: list[int]) -> Tensor:
    """What the model itself says about every next token: fp32 [tokens, vocabulary]."""
    with torch.no_grad():
        found = network(torch.tensor([tokens]))
    return getattr(found, "logits", found)[0]


def greedy(network: Any, prompt: list[int], count: int) -> list[int]:
    """The model's own greedy text by whole passes, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(network, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    """Of ragged lengths, the same every time."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(6, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
