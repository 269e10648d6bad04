"""Configs are values that refuse what no model can be made from, and inputs that do not fit are named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import flatout.models as models
from flatout.errors import UsageError
from flatout.models import (
    MLP,
    Bert,
    BertConfig,
    CharacterGeneratorConfig,
    ConvNet,
    ConvNetConfig,
    GPT2Config,
    MLPConfig,
    RecurrentClassifierConfig,
    ResNet,
    ResNetConfig,
    Seq2SeqConfig,
    TransformerConfig,
)
from tests.models.small import bert_config, classifier, generator, tokens

CONFIGS = [getattr(models, name) for name in models.__all__ if name.endswith("Config")]


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_are_frozen_and_take_keywords_only(config: type) -> None:
    assert all(one.kw_only for one in dataclasses.fields(config))
    assert config.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPT2Config(width=100, heads=12),
            "GPT2Config: width is 100 with 12 heads; .* 8.33; set heads to 10, or",
        ),
        (lambda: BertConfig(width=100, heads=12), "BertConfig: width is 100 with 12 heads"),
        (lambda: TransformerConfig(heads=7), "TransformerConfig: width is 512 with 7 heads"),
        (
            lambda: Seq2SeqConfig(heads=7),
            "Seq2SeqConfig: width is 512 with 7 heads; .*; set heads to 4, or width to 518",
        ),
        (lambda: GPT2Config(layers=0), "GPT2Config: layers is 0; it must be a whole number of at least 1"),
        (lambda: GPT2Config(vocab_size=True), "vocab_size is True"),
        (lambda: GPT2Config(inner_width=-1), "inner_width is -1"),
        (lambda: BertConfig(inner_width=0), "inner_width is 0"),
        (lambda: Seq2SeqConfig(decoder_layers=1.5), "decoder_layers is 1.5"),  # type: ignore[arg-type]
        (lambda: GPT2Config(dropout=1.0), "dropout is 1.0; it must be at least 0 and below 1; 0.0 switches it off"),
        (lambda: BertConfig(attention_dropout=-0.1), "attention_dropout is -0.1"),
        (lambda: GPT2Config(norm_epsilon=math.nan), "norm_epsilon is nan; it must be a finite number above 0"),
        (lambda: BertConfig(init_std=0), "init_std is 0"),
        (
            lambda: GPT2Config(activation="swish"),
            "activation is 'swish'; it must be one of 'gelu', 'gelu_tanh', 'relu'",
        ),  # type: ignore[arg-type]
        (lambda: GPT2Config(tied=1), "tied is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: GPT2Config.of_size("2B"), "no GPT-2 of size '2B'; published: 124M, 355M, 774M, 1.5B"),  # type: ignore[arg-type]
        (lambda: MLPConfig(hidden=(3, 0)), r"hidden is \(3, 0\); it must be a tuple of at least 0 whole"),
        (lambda: MLPConfig(hidden=[3]), r"hidden is \[3\]; it must be a tuple"),  # type: ignore[arg-type]
        (lambda: ConvNetConfig(stages=()), r"stages is \(\); it must be a tuple of at least 1"),
        (lambda: ConvNetConfig(height=7, stages=(1, 2, 3)), "7 x 28 with 3 stages; .* at least 8"),
        (lambda: ResNetConfig(stages=()), r"stages is \(\)"),
        (lambda: ResNetConfig(classes=0), "classes is 0"),
        (lambda: RecurrentClassifierConfig(vocab_size=9, classes=0), "classes is 0"),
        (lambda: CharacterGeneratorConfig(vocab_size=9, cell="gru"), "cell is 'gru'; it must be one of 'rnn', 'lstm'"),  # type: ignore[arg-type]
    ],
)
def test_what_no_model_can_be_made_from(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MLP()(torch.zeros(2, 7)), r"input is \[2, 7\]; it must be \[batch, ...\] with 1000 values each"),
        (lambda: ConvNet()(torch.zeros(2, 3, 28, 27)), r"\[2, 3, 28, 27\]; it must be \[batch, 3, 28, 28\]"),
        (lambda: ResNet(ResNetConfig(stages=(1,), width=4))(torch.zeros(2, 1, 8, 8)), r"must be \[batch, 3, height"),
        (
            lambda: classifier("rnn")(tokens(2, 3), torch.ones(2, 3).bool()),
            r"lengths is torch.bool .*numbers \[2\]; count",
        ),
        (lambda: Bert(bert_config())(tokens(2, 3), tokens(2, 4)), r"token_types is \[2, 4\] while tokens is \[2, 3\]"),
        (lambda: generator().generate(tokens(1, 1), -1), "count is -1 and temperature 1.0; both must be at least 0"),
        (lambda: generator().generate(tokens(1, 1), 2.5), "count is 2.5 .* count a whole number"),  # type: ignore[arg-type]
        (lambda: generator().generate(tokens(1, 1), 2, temperature=math.inf), "temperature inf; .* finite"),
    ],
)
def test_inputs_that_do_not_fit(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_a_published_size_can_be_changed() -> None:
    config = GPT2Config.of_size("355M", dropout=0.0, layers=2)
    assert (config.width, config.heads, config.layers, config.dropout) == (1024, 16, 2, 0.0)
    assert BertConfig.large(layers=3) == BertConfig(width=1024, heads=16, layers=3)


def test_generated_text_goes_on_from_the_prompt() -> None:
    torch.manual_seed(0)
    model, prompt = generator().eval(), tokens(2, 4)
    text = model.generate(prompt, 6, temperature=0)
    assert text.shape == (2, 10)
    assert text[:, :4].equal(prompt)
    for place in range(4, 10):  # step by step from a state gives what the whole text gives
        assert text[:, place].equal(model(text[:, :place])[:, -1].argmax(-1))
    drawn = [model.generate(prompt, 6, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])


def test_an_lstm_starts_by_remembering() -> None:
    bias = classifier("lstm").body.layers.bias_ih_l1
    assert bias[10:20].eq(1).all()
    assert not bias[:10].any()
    assert not bias[20:].any()
