"""How to call a model: the names of its inputs, its mask, its vocabulary, its maximum input length.

Read from the signature of `forward` and the model's config. Unknown values are None and are not checked: then the
model's own error says what is wrong, and `predict` finds the sample that caused it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

MaskStyle = Literal["ones", "real", "padding"]

_MASKS: dict[str, MaskStyle] = {
    "attention_mask": "ones",  # Hugging Face: whole numbers, 1 = real
    "valid": "real",  # flatout.models: bool, True = real
    "src_key_padding_mask": "padding",  # torch.nn.Transformer: bool, True = padding
}


@dataclass(frozen=True, kw_only=True)
class Calling:
    """What is known of a model's inputs."""

    input_name: str | None = None
    """The keyword of a bare tensor; None: it is the first argument."""
    mask_name: str | None = None
    """The keyword that takes which tokens are real; None: the model knows no padding."""
    mask_style: MaskStyle = "ones"
    mask_required: bool = False
    """The model cannot be called without a mask."""
    vocabulary: int | None = None
    """Token ids are below it."""
    vocabulary_sure: bool = True
    """False: it is the size of the only embedding, which may be of something else than the first input."""
    checks_itself: bool = False
    """On a CPU an id that is not in an embedding is an ordinary error of the model's."""
    longest: int | None = None
    """Tokens of the longest input that the model has positions for."""
    padding_id: int = 0
    """The token id of padding."""
    constants: tuple[tuple[str, object], ...] = ()
    """Further keywords of every call."""

    def mask(self, lengths: Tensor, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        """Lengths [batch] -> the mask [batch, tokens] in the model's own style. dtype: that of the user's own masks."""
        real = torch.arange(tokens, device=lengths.device) < lengths[:, None]
        if dtype is None:
            dtype = torch.int64 if self.mask_style == "ones" else torch.bool
        return (~real if self.mask_style == "padding" else real).to(dtype)


def calling_of(model: nn.Module) -> Calling:
    """From the model's signature and config."""
    names = forward_parameters(model)
    mask_name = next((name for name in _MASKS if name in names), None)
    config = getattr(model, "config", None)
    hugging_face = hasattr(model, "main_input_name") and config is not None
    padding_id = getattr(config, "pad_token_id", None) if hugging_face else None
    main = str(model.main_input_name) if hugging_face else None
    # The first input of speech or vision models is no ids: their embeddings are of the decoder's.
    vocabulary, sure = _vocabulary(model, config) if main is None or main.endswith("ids") else (None, True)
    return Calling(
        input_name=main,
        mask_name=mask_name,
        mask_style=_MASKS[mask_name] if mask_name else "ones",
        mask_required=mask_name is not None and names[mask_name].default is inspect.Parameter.empty,
        vocabulary=vocabulary,
        vocabulary_sure=sure,
        checks_itself=next((one.device.type == "cpu" for one in model.parameters()), True),
        longest=_longest(model, config),
        padding_id=padding_id if isinstance(padding_id, int) and padding_id >= 0 else 0,
        # A cache of keys and values is of no use to one pass, and no tensor that could be cut into samples.
        constants=(("use_cache", False),) if hugging_face and "use_cache" in names else (),
    )


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What its forward takes, by name; nothing where that cannot be read."""
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # made in C, or with a signature of its own
        return {}


def _vocabulary(model: nn.Module, config: object) -> tuple[int | None, bool]:
    """Its size, and whether it is surely that of the first input."""
    find = getattr(model, "get_input_embeddings", None)
    if find is not None:
        try:
            size = getattr(find(), "num_embeddings", None)
        except (NotImplementedError, AttributeError):
            size = None
        return (size if isinstance(size, int) else None), True
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    size = getattr(config, "vocab_size", None)
    if isinstance(size, int) and embeddings:  # without one it is the vocabulary of the outputs, as of speech to text
        return size, True
    return (embeddings[0].num_embeddings, False) if len(embeddings) == 1 else (None, True)


def _longest(model: nn.Module, config: object) -> int | None:
    size = getattr(config, "max_tokens", None)
    if isinstance(size, int):
        return size
    size = getattr(config, "max_position_embeddings", None)
    if not isinstance(size, int):
        return None
    for table in model.modules():
        # Learnt positions end; computed ones (rotary) do not, and their limit in the config is advice.
        if isinstance(table, nn.Embedding) and table.num_embeddings == size:
            return size - (table.padding_idx + 1 if table.padding_idx is not None else 0)
    return None
