"""Models of transformers, made from configurations with random weights: no network, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.memory.cases import BF16, BLOCK, SELECTIVE, Case, Subject, cases_of, parts


def with_labels(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def text(vocabulary: int, length: int) -> Callable[[int], Any]:
    def batch(samples: int) -> Any:
        tokens = torch.randint(vocabulary, (samples, length))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}

    return batch


def images(size: int, classes: int) -> Callable[[int], Any]:
    def batch(samples: int) -> Any:
        return {"pixel_values": torch.randn(samples, 3, size, size), "labels": torch.randint(classes, (samples,))}

    return batch


def subject(name: str, make: Callable[[], nn.Module], batch: Callable[[int], Any], sizes: tuple[int, int]) -> Subject:
    return Subject(name=name, make=make, batch=batch, loss_fn=with_labels, sizes=sizes)


def hugging_face_cases() -> list[Case]:
    """Raises ImportError where transformers is not installed."""
    return [*_encoders(), *_decoders()]


def _encoders() -> list[Case]:
    import transformers as hf

    bert = hf.BertConfig(
        vocab_size=2500, hidden_size=144, num_hidden_layers=3, num_attention_heads=4, intermediate_size=576
    )
    vit = hf.ViTConfig(
        hidden_size=144,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=576,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    convnext = hf.ConvNextConfig(hidden_sizes=[24, 48, 96, 120], depths=[1, 1, 2, 1], image_size=64, num_labels=10)
    return [
        *cases_of(
            subject("HF BERT", lambda: hf.BertForMaskedLM(bert), text(2500, 80), (4, 20)),
            ("adamw", {}),
            ("adam", BF16),
        ),
        *cases_of(
            subject("HF ViT", lambda: hf.ViTForImageClassification(vit), images(64, 10), (4, 24)),
            ("adam", {}),
            ("momentum", BF16),
        ),
        *cases_of(
            subject("HF ConvNeXt", lambda: hf.ConvNextForImageClassification(convnext), images(64, 10), (4, 20)),
            ("adamw", {}),
            ("momentum", BF16),
        ),
    ]


def _decoders() -> list[Case]:
    import transformers as hf

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    gpt2 = hf.GPT2Config(vocab_size=2500, n_embd=144, n_layer=3, n_head=4, n_positions=128, **ends)
    llama = hf.LlamaConfig(
        vocab_size=2500,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        **ends,
    )
    t5 = hf.T5Config(
        vocab_size=2500, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0, **ends
    )
    tokens = text(2500, 80)
    return [
        *cases_of(
            subject("HF GPT-2", lambda: hf.GPT2LMHeadModel(gpt2), tokens, (4, 20)),
            ("adamw", {}),
            ("adam", BLOCK),
            ("momentum", parts(2)),
        ),
        *cases_of(
            subject("HF Llama", lambda: hf.LlamaForCausalLM(llama), tokens, (4, 20)),
            ("adamw", {}),
            ("adamw", {**BF16, **SELECTIVE}),
        ),
        *cases_of(
            subject("HF T5", lambda: hf.T5ForConditionalGeneration(t5), tokens, (4, 20)),
            ("adafactor", {}),
            ("adamw", BF16),
        ),
    ]
