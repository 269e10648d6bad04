"""The models of the matrix, each with its data: small, without dropout, so that what differs is rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatout import models

SAMPLES, LENGTH, VOCABULARY, CLASSES = 96, 16, 64, 5
IGNORED = -100
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_tokens": LENGTH, "width": 32, "heads": 4, "dropout": 0.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how its loss is computed from a batch: (inputs, targets, numbers of the samples)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    of_tokens: bool
    """Is there a target for each token, some of them ignored?"""
    shifted: bool = False
    """Does it take what precedes the targets as a second input?"""

    def data(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ragged: the samples of a batch have from 1 to 16 targets that count."""
        generator = torch.Generator().manual_seed(7)
        inputs = self.inputs(generator)
        if not self.of_tokens:
            return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator), torch.arange(SAMPLES)
        targets = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        counted = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
        targets[torch.arange(LENGTH)[None] >= counted] = IGNORED
        return inputs, targets, torch.arange(SAMPLES)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, targets, _ = batch
        output = model(inputs, targets.clamp_min(0)) if self.shifted else model(inputs)
        return cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    def count_terms(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORED).sum()


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def _images(size: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(SAMPLES, 3, size, size, generator=generator)


def _classifier() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "embedding_width": 16, "hidden_width": 24, "layers": 2}
    return models.RecurrentClassifier(models.RecurrentClassifierConfig(cell="lstm", classes=CLASSES, **sizes))


def _gpt2() -> nn.Module:
    still = {"embedding_dropout": 0.0, "attention_dropout": 0.0}
    return models.GPT2(models.GPT2Config(**SIZES, layers=4, **still))


def _bert() -> nn.Module:
    return models.BertMaskedLM(models.BertConfig(**SIZES, layers=4, inner_width=64, attention_dropout=0.0))


def _convnet() -> nn.Module:
    sizes = models.ConvNetConfig(channels=3, height=12, width=12, stages=(8, 8), hidden=16, classes=CLASSES)
    return models.ConvNet(sizes)


CASES: dict[str, Case] = {
    "mlp": Case(
        make=lambda: models.MLP(models.MLPConfig(inputs=48, hidden=(32, 32), classes=CLASSES)),
        inputs=lambda generator: torch.randn(SAMPLES, 48, generator=generator),
        of_tokens=False,
    ),
    "convnet": Case(make=_convnet, inputs=_images(12), of_tokens=False),
    "lstm": Case(make=_classifier, inputs=_tokens, of_tokens=False),
    "generator": Case(
        make=lambda: models.CharacterGenerator(
            models.CharacterGeneratorConfig(
                cell="rnn", vocab_size=VOCABULARY, embedding_width=16, hidden_width=24, layers=2
            )
        ),
        inputs=_tokens,
        of_tokens=True,
    ),
    "transformer": Case(
        make=lambda: models.TransformerLM(models.TransformerConfig(**SIZES, layers=4)), inputs=_tokens, of_tokens=True
    ),
    "seq2seq": Case(
        make=lambda: models.Seq2SeqTransformer(models.Seq2SeqConfig(**SIZES, encoder_layers=4, decoder_layers=4)),
        inputs=_tokens,
        of_tokens=True,
        shifted=True,
    ),
    "bert": Case(make=_bert, inputs=_tokens, of_tokens=True),
    "gpt2": Case(make=_gpt2, inputs=_tokens, of_tokens=True),
    "resnet": Case(
        make=lambda: models.ResNet(models.ResNetConfig(classes=CLASSES, stages=(1, 1), width=4)),
        inputs=_images(16),
        of_tokens=False,
    ),
}
"""The last one has batch norms, which several ranks refuse."""
