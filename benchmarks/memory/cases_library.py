"""The library's own models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.memory.cases import BF16, BLOCK, SELECTIVE, Case, Subject, cases_of, classify, next_token, parts
from flatout.models import (
    GPT2,
    MLP,
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

CHANNELS_LAST: dict[str, Any] = {"memory_format": "channels_last"}


def library_cases() -> list[Case]:
    return [*_images(), *_recurrent(), *_transformers()]


def _images() -> list[Case]:
    flat, loss = classify(784, classes=10)
    mlp = Subject(
        name="MLP",
        make=lambda: MLP(MLPConfig(inputs=784, hidden=(700, 300), classes=10, dropout=0.1)),
        batch=flat,
        loss_fn=loss,
        sizes=(64, 512),
    )
    small, loss = classify(3, 28, 28, classes=10)
    convnet = Subject(name="ConvNet", make=lambda: ConvNet(ConvNetConfig()), batch=small, loss_fn=loss, sizes=(16, 96))
    large, loss = classify(3, 72, 72, classes=100)
    resnet = Subject(
        name="ResNet",
        make=lambda: ResNet(ResNetConfig(classes=100, stages=(2, 2, 2, 1), width=24)),
        batch=large,
        loss_fn=loss,
        sizes=(4, 20),
    )
    return [
        *cases_of(mlp, ("adam", {}), ("adamw", BF16), ("momentum", parts(2)), ("adafactor", {})),
        *cases_of(convnet, ("adam", {}), ("adam", BF16), ("momentum", parts(4))),
        *cases_of(resnet, ("momentum", {}), ("momentum", BF16), ("adam", BLOCK), ("adam", {**BF16, **CHANNELS_LAST})),
    ]


def _recurrent() -> list[Case]:
    def classifier(cell: Any) -> Subject:
        config = RecurrentClassifierConfig(
            cell=cell, vocab_size=2000, embedding_width=100, hidden_width=160, layers=2, classes=5, dropout=0.1
        )

        def batch(samples: int) -> Any:
            return torch.randint(2000, (samples, 60)), torch.randint(5, (samples,))

        _, loss = classify(classes=5)
        return Subject(
            name=f"{cell.upper()} classifier",
            make=lambda: RecurrentClassifier(config),
            batch=batch,
            loss_fn=loss,
            sizes=(8, 48),
        )

    config = CharacterGeneratorConfig(vocab_size=90, embedding_width=64, hidden_width=200, layers=2)
    batch, loss = next_token(90, 80)
    characters = Subject(
        name="LSTM generator", make=lambda: CharacterGenerator(config), batch=batch, loss_fn=loss, sizes=(8, 40)
    )
    return [
        *cases_of(classifier("rnn"), ("adam", {}), ("momentum", BF16)),
        *cases_of(classifier("lstm"), ("adam", {}), ("adam", BF16)),
        *cases_of(characters, ("adamw", parts(2)), ("momentum", {})),
    ]


def _transformers() -> list[Case]:
    batch, loss = next_token(3000, 96)
    language = Subject(
        name="TransformerLM",
        make=lambda: TransformerLM(TransformerConfig(vocab_size=3000, max_tokens=96, width=192, heads=6, layers=3)),
        batch=batch,
        loss_fn=loss,
        sizes=(2, 12),
    )
    gpt2 = Subject(
        name="GPT2",
        make=lambda: GPT2(GPT2Config(vocab_size=3000, max_tokens=128, width=160, heads=5, layers=4)),
        batch=batch,
        loss_fn=loss,
        sizes=(4, 16),
    )
    bert = Subject(
        name="BertMaskedLM",
        make=lambda: BertMaskedLM(BertConfig(vocab_size=3000, max_tokens=128, width=160, heads=4, layers=4)),
        batch=batch,
        loss_fn=loss,
        sizes=(4, 16),
    )
    return [
        *cases_of(language, ("adam", {}), ("adam", BF16), ("adamw", BLOCK), ("adafactor", {})),
        *cases_of(_translation(), ("adam", {}), ("adamw", {**BF16, **parts(2)})),
        *cases_of(bert, ("adamw", {}), ("adam", SELECTIVE), ("momentum", BF16)),
        *cases_of(gpt2, ("adamw", {}), ("adamw", {**BF16, **BLOCK}), ("momentum", parts(2)), ("adafactor", {})),
    ]


def _translation() -> Subject:
    criterion = nn.CrossEntropyLoss()

    def batch(samples: int) -> Any:
        return tuple(torch.randint(2500, (samples, length)) for length in (50, 40, 40))

    def loss(model: Any, batch: Any) -> Any:
        source, target, after = batch
        return criterion(model(source, target).flatten(0, 1), after.flatten())

    sizes: dict[str, Any] = {"vocab_size": 2500, "max_tokens": 64, "width": 160, "heads": 5}
    return Subject(
        name="Seq2Seq",
        make=lambda: Seq2SeqTransformer(Seq2SeqConfig(**sizes, encoder_layers=2, decoder_layers=2)),
        batch=batch,
        loss_fn=loss,
        sizes=(4, 24),
    )
