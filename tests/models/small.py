"""One small model of each family, with odd sizes, and an input for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.models import (
    GPT2,
    MLP,
    Bert,
    BertConfig,
    BertMaskedLM,
    CharacterGenerator,
    CharacterGeneratorConfig,
    ConvNet,
    ConvNetConfig,
    GPT2Config,
    MLPConfig,
    RecurrentClassifier,
    RecurrentClassifierConfig,
    ResNet,
    ResNetConfig,
    Seq2SeqConfig,
    Seq2SeqTransformer,
    TransformerConfig,
    TransformerLM,
)

VOCABULARY = 37
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_tokens": 16, "width": 24, "heads": 3}
STILL: dict[str, Any] = {"dropout": 0.0}


@dataclass(frozen=True, kw_only=True)
class Small:
    """`inputs(batch, length)` are the arguments of forward; `output(batch, length)` is the shape that it must give."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    output: Callable[[int, int], tuple[int, ...]]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def gpt2(**changes: Any) -> GPT2:
    still = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    return GPT2(GPT2Config(**{**SIZES, "layers": 2, **still, **changes}))


def bert_config(**changes: Any) -> BertConfig:
    return BertConfig(**{**SIZES, "layers": 2, "inner_width": 40, **STILL, "attention_dropout": 0.0, **changes})


def transformer(**changes: Any) -> TransformerLM:
    return TransformerLM(TransformerConfig(**{**SIZES, "layers": 2, **STILL, **changes}))


def seq2seq(**changes: Any) -> Seq2SeqTransformer:
    return Seq2SeqTransformer(Seq2SeqConfig(**{**SIZES, "encoder_layers": 2, "decoder_layers": 2, **STILL, **changes}))


def classifier(cell: Any, layers: int = 2) -> RecurrentClassifier:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "embedding_width": 6, "hidden_width": 10, "layers": layers}
    return RecurrentClassifier(RecurrentClassifierConfig(cell=cell, classes=5, **sizes))


def generator(cell: Any = "lstm") -> CharacterGenerator:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "embedding_width": 6, "hidden_width": 10, "layers": 2}
    return CharacterGenerator(CharacterGeneratorConfig(cell=cell, **sizes))


def resnet() -> ResNet:
    return ResNet(ResNetConfig(classes=5, stages=(2, 1), width=4, zero_init_residual=False))


def _of_tokens(make: Callable[[], nn.Module], last: int = VOCABULARY) -> Small:
    return Small(make=make, inputs=lambda b, n: (tokens(b, n),), output=lambda b, n: (b, n, last))


def _of_sequence(make: Callable[[], nn.Module]) -> Small:
    return Small(make=make, inputs=lambda b, n: (tokens(b, n),), output=lambda b, n: (b, 5))


SMALL: dict[str, Small] = {
    "mlp": Small(
        make=lambda: MLP(MLPConfig(inputs=21, hidden=(9, 7), classes=5)),
        inputs=lambda b, n: (torch.randn(b, 3, 7),),
        output=lambda b, n: (b, 5),
    ),
    "convnet": Small(
        make=lambda: ConvNet(ConvNetConfig(channels=2, height=9, width=13, stages=(3, 4), hidden=6, classes=5)),
        inputs=lambda b, n: (torch.randn(b, 2, 9, 13),),
        output=lambda b, n: (b, 5),
    ),
    "resnet": Small(make=resnet, inputs=lambda b, n: (torch.randn(b, 3, 33, 47),), output=lambda b, n: (b, 5)),
    "rnn": _of_sequence(lambda: classifier("rnn")),
    "lstm": _of_sequence(lambda: classifier("lstm")),
    "generator": _of_tokens(generator),
    "transformer": _of_tokens(transformer),
    "bidirectional": _of_tokens(lambda: transformer(causal=False)),
    "seq2seq": Small(
        make=seq2seq, inputs=lambda b, n: (tokens(b, n + 2), tokens(b, n)), output=lambda b, n: (b, n, VOCABULARY)
    ),
    "bert_masked_lm": _of_tokens(lambda: BertMaskedLM(bert_config())),
    "bert": Small(
        make=lambda: Bert(bert_config()), inputs=lambda b, n: (tokens(b, n),), output=lambda b, n: (b, n, 24)
    ),
    "gpt2": _of_tokens(gpt2),
    "gpt2_untied": _of_tokens(lambda: gpt2(tied=False)),
}


def main_output(output: Any) -> Tensor:
    """The tensor that `Small.output` speaks of: Bert gives two."""
    return output if isinstance(output, Tensor) else output.hidden
