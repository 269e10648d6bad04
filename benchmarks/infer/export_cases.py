"""The models that are exported: ours, transformers' with random weights, and modules that no file can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.infer.exporting.report import Dynamic
from flatout.models import (
    GPT2,
    MLP,
    Bert,
    BertConfig,
    ConvNet,
    GPT2Config,
    RecurrentClassifier,
    RecurrentClassifierConfig,
    ResNet,
    ResNetConfig,
)

BATCH, TOKENS, VOCABULARY = 8, 64, 5000


@dataclass(frozen=True, kw_only=True)
class Case:
    """`expected`: a file with a batch that varies can be made."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    dynamic: Dynamic = "batch"
    expected: bool = True


def _ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS))


def _lengths() -> Tensor:
    return torch.arange(TOKENS, 0, -TOKENS // BATCH)[:BATCH]


def _lstm() -> tuple[nn.Module, Any]:
    config = RecurrentClassifierConfig(vocab_size=VOCABULARY, classes=5)
    return RecurrentClassifier(config), {"tokens": _ids(), "lengths": _lengths()}


def _bert() -> tuple[nn.Module, Any]:
    return Bert(BertConfig(vocab_size=VOCABULARY, width=256, heads=4, layers=4)), {
        "tokens": _ids(),
        "valid": _lengths(),
    }


def _gpt2() -> tuple[nn.Module, Any]:
    return GPT2(GPT2Config(vocab_size=VOCABULARY, width=256, heads=4, layers=4)), {"tokens": _ids()}


def _transformers_bert() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    mask = (torch.arange(TOKENS) < _lengths()[:, None]).long()
    return transformers.BertModel(config), {"input_ids": _ids(), "attention_mask": mask}


def _transformers_gpt2() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": _ids()}


def _transformers_llama() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=704, use_cache=False
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": _ids()}


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0


class _Branch(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class _Numpy(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.from_numpy(x.numpy() * 2))


class _Counter(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class _OverSamples(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(sample) for sample in x])


def _small(kind: type[nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (kind(), (torch.randn(3, 4),))


CASES = (
    Case(name="MLP", make=lambda: (MLP(), (torch.randn(64, 1000),))),
    Case(name="ConvNet", make=lambda: (ConvNet(), (torch.randn(32, 3, 28, 28),))),
    Case(
        name="ResNet-50, 96 x 96",
        make=lambda: (ResNet(ResNetConfig(zero_init_residual=False)), (torch.randn(4, 3, 96, 96),)),
    ),
    Case(name="LSTM classifier", make=_lstm),
    Case(name="Bert, 4 x 256", make=_bert, dynamic="length"),
    Case(name="GPT-2, 4 x 256", make=_gpt2, dynamic="length"),
    Case(name="transformers BERT", make=_transformers_bert, dynamic="length"),
    Case(name="transformers GPT-2", make=_transformers_gpt2, dynamic="length"),
    Case(name="transformers Llama", make=_transformers_llama, dynamic="length"),
    Case(name="if on data", make=_small(_Branch), expected=False),
    Case(name="numpy inside", make=_small(_Numpy), expected=False),
    Case(name="counter in Python", make=_small(_Counter), expected=False),
    Case(name="loop over samples", make=_small(_OverSamples), expected=False),
)
