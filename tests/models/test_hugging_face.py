"""State dicts and configs of transformers: read right, refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.models import GPT2, Bert, BertConfig, BertMaskedLM, GPT2Config
from tests.models import foreign
from tests.models.foreign import HEADS, INNER, LAYERS, POSITIONS, WIDTH

VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_tokens": POSITIONS,
    "width": WIDTH,
    "heads": HEADS,
    "layers": LAYERS,
    "inner_width": INNER,
}
GPT2_CONFIG, BERT_CONFIG = GPT2Config(**SIZES), BertConfig(**SIZES)

GPT2_DICT: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": INNER,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "summary_type": "cls_index",
    "transformers_version": "5.23.0",
}
BERT_DICT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_computes_what_its_weights_mean(prefix: str) -> None:
    state, batch = foreign.gpt2_state(VOCABULARY, prefix=prefix), tokens(3, 11)
    model = GPT2.from_hugging_face(state, GPT2_CONFIG).eval()
    plain = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    for row, logits in zip(batch, model(batch), strict=True):
        close(logits, foreign.gpt2_logits(plain, row, plain["wte.weight"]))


def test_gpt2_with_a_head_of_its_own() -> None:
    state, batch = foreign.gpt2_state(VOCABULARY), tokens(1, 5)
    state["lm_head.weight"] = torch.randn(VOCABULARY, WIDTH)
    model = GPT2.from_hugging_face(state, GPT2Config(**SIZES, tied=False)).eval()
    plain = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    close(model(batch)[0], foreign.gpt2_logits(plain, batch[0], state["lm_head.weight"]))
    with pytest.raises(UsageError, match=r"wte.weight and lm_head.weight differ; .* one tensor; set tied=False"):
        GPT2.from_hugging_face(state, GPT2_CONFIG)


def test_bert_computes_what_its_weights_mean() -> None:
    state, batch, types = foreign.bert_state(VOCABULARY), tokens(3, 11), tokens(3, 11) % 2
    encoder = Bert.from_hugging_face(state, BERT_CONFIG).eval()
    language_model = BertMaskedLM.from_hugging_face(state, BERT_CONFIG).eval()
    lengths = torch.tensor([11, 6, 1])
    hidden, pooled = encoder(batch, types, lengths)
    assert pooled is not None
    logits = language_model(batch, types, lengths)
    for row, length in enumerate(lengths.tolist()):
        expected = foreign.bert_outputs(state, batch[row, :length], types[row, :length])
        for mine, theirs in zip((hidden[row, :length], pooled[row], logits[row, :length]), expected, strict=True):
            close(mine, theirs)


def test_no_types_are_type_0() -> None:
    model, batch = Bert.from_hugging_face(foreign.bert_state(VOCABULARY), BERT_CONFIG).eval(), tokens(2, 4)
    close(model(batch).hidden, model(batch, torch.zeros_like(batch)).hidden)


def test_a_bert_with_a_head_of_its_own() -> None:
    state = foreign.bert_state(VOCABULARY)
    state["cls.predictions.decoder.weight"] = torch.randn(VOCABULARY, WIDTH)
    state["cls.predictions.decoder.bias"] = torch.randn(VOCABULARY)  # counts; the other bias is a left-over
    model = BertMaskedLM.from_hugging_face(state, BertConfig(**SIZES, tied=False)).eval()
    batch = tokens(1, 4)
    close(model(batch)[0], foreign.bert_outputs(state, batch[0], torch.zeros_like(batch[0]))[2])


def test_names_of_older_files() -> None:
    state = foreign.bert_state(VOCABULARY)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
        if not name.startswith("cls.predictions.decoder")
    }
    renamed["bert.embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    batch = tokens(2, 4)
    new, old = (BertMaskedLM.from_hugging_face(one, BERT_CONFIG).eval() for one in (state, renamed))
    assert new(batch).equal(old(batch))
    gpt2 = foreign.gpt2_state(VOCABULARY)
    buffers = {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.1.attn.masked_bias": torch.ones(1)}
    GPT2.from_hugging_face({**gpt2, **buffers}, GPT2_CONFIG)


def test_the_head_and_the_embedding_stay_one() -> None:
    gpt2 = GPT2.from_hugging_face(foreign.gpt2_state(VOCABULARY), GPT2_CONFIG)
    bert = BertMaskedLM.from_hugging_face(foreign.bert_state(VOCABULARY), BERT_CONFIG)
    assert gpt2.head.weight is gpt2.tokens.weight
    assert bert.head.weight is bert.bert.tokens.weight
    assert gpt2.training, "as any new model"
    for padded in (gpt2.head.weight, bert.head.weight, bert.head.bias):
        assert len(padded) == 64
        assert not padded[VOCABULARY:].any()
    assert all(parameter.requires_grad for parameter in (*gpt2.parameters(), *bert.parameters()))


def test_the_callers_weights_are_copied_in_their_dtype() -> None:
    state = {name: tensor.bfloat16() for name, tensor in foreign.gpt2_state(VOCABULARY).items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    model = GPT2.from_hugging_face(state, GPT2_CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.dtype is torch.bfloat16
            assert parameter.is_contiguous()
            parameter.zero_()
    assert all(tensor.equal(before[name]) for name, tensor in state.items())


def test_what_does_not_fit_is_listed() -> None:
    state = foreign.gpt2_state(VOCABULARY)
    del state["transformer.h.1.ln_1.bias"]
    state["transformer.h.7.ln_1.bias"] = torch.zeros(WIDTH)
    state["transformer.wpe.weight"] = torch.zeros(9, WIDTH)
    state["transformer.h.0.mlp.c_fc.weight"] = state["transformer.h.0.mlp.c_fc.weight"].T
    state["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(INNER, dtype=torch.int8)
    with pytest.raises(UsageError) as caught:
        GPT2.from_hugging_face(state, GPT2_CONFIG)
    assert str(caught.value) == (
        "the state dict does not fit GPT2: 1 missing (h.1.ln_1.bias); 1 unexpected (h.7.ln_1.bias); "
        "3 that do not match (wpe.weight is [9, 12] and not [16, 12], h.0.mlp.c_fc.weight is [20, 12] and not "
        "[12, 20], h.0.mlp.c_fc.bias is torch.int8 and not floating point); "
        "make the config with from_hugging_face from the config of these weights"
    )


def test_long_lists_are_cut() -> None:
    with pytest.raises(UsageError, match=r"28 missing \(wte.weight, .* and 20 more\)"):
        GPT2.from_hugging_face({}, GPT2_CONFIG)
    with pytest.raises(
        UsageError, match=r"the state dict is a GPT2; it must map names to tensors; pass model\.state_dict"
    ):
        GPT2.from_hugging_face(GPT2(GPT2_CONFIG), GPT2_CONFIG)  # type: ignore[arg-type]


def test_a_bert_without_pooler() -> None:
    state = {name: tensor for name, tensor in foreign.bert_state(VOCABULARY).items() if "pooler" not in name}
    with pytest.raises(UsageError, match=r"2 missing \(pooler.dense.weight, pooler.dense.bias\)"):
        Bert.from_hugging_face(state, BERT_CONFIG)
    model = Bert.from_hugging_face(state, BERT_CONFIG, pooler=False)
    assert model(tokens(1, 2)).pooled is None


def test_a_vocabulary_of_another_size_does_not_fit() -> None:
    with pytest.raises(UsageError, match=r"wte.weight is \[38, 12\] and not \[37, 12\]"):
        GPT2.from_hugging_face(foreign.gpt2_state(38), GPT2_CONFIG)


def test_configs_are_read() -> None:
    assert GPT2Config.from_hugging_face(GPT2_DICT) == GPT2_CONFIG
    assert BertConfig.from_hugging_face(BERT_DICT) == BERT_CONFIG
    assert GPT2Config.from_hugging_face({"model_type": "gpt2", "n_inner": None}) == GPT2Config()
    assert BertConfig.from_hugging_face({}) == BertConfig()
    changed = {**GPT2_DICT, "activation_function": "relu", "tie_word_embeddings": False, "resid_pdrop": 0.0}
    assert GPT2Config.from_hugging_face(changed) == GPT2Config(**SIZES, activation="relu", tied=False, dropout=0.0)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            GPT2Config,
            {"activation_function": "swish"},
            "activation is 'swish'; supported: 'gelu', 'gelu_new', .*'relu'",
        ),
        (GPT2Config, {"scale_attn_weights": False}, "gpt2 config has scale_attn_weights = False; supported: True; use"),
        (GPT2Config, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (GPT2Config, {"add_cross_attention": True}, "add_cross_attention = True; supported: False"),
        (GPT2Config, {"model_type": "bert"}, "gpt2 config has model_type = 'bert'; supported: 'gpt2'"),
        (GPT2Config, {"n_head": 5}, "width is 12 with 5 heads"),
        (BertConfig, {"hidden_act": "silu"}, "activation is 'silu'"),
        (
            BertConfig,
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key'; .*'absolute'",
        ),
        (BertConfig, {"is_decoder": True}, "is_decoder = True"),
    ],
)
def test_configs_of_other_computations_are_refused(config: Any, changes: dict[str, Any], message: str) -> None:
    whole = GPT2_DICT if config is GPT2Config else BERT_DICT
    with pytest.raises(UsageError, match=message):
        config.from_hugging_face({**whole, **changes})


def test_a_config_object_is_not_a_dict() -> None:
    with pytest.raises(UsageError, match=r"the config is a object; it must be a dict; pass model.config.to_dict\(\)"):
        GPT2Config.from_hugging_face(object())  # type: ignore[arg-type]
