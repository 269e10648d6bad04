"""Reads models as a Decoder: GPT-2 and TransformerLM of flatout.models; GPT-2, Llama and similar ones of transformers.

transformers is never imported: a model is known by its class and its config. Weights are not copied. Anything in the
forward pass that they do not say would be lost silently: a LoRA layer's second product, a steering hook, a weight that
is normalised on use. So each module must be of exactly a known class, with that class's forward, no hooks and no
parametrization, and each weight a plain tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol  # Any: see _Untyped

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.infer.generation.decoder import Activation, Block, Decoder, Linear, Norm
from flatout.models.bert import BertMaskedLM
from flatout.models.feed_forward import HUGGING_FACE_ACTIVATIONS
from flatout.models.gpt2 import GPT2
from flatout.models.pre_norm_block import PreNormBlock
from flatout.models.transformer import TransformerLM

_ACTIVATIONS: dict[str, Activation] = {**HUGGING_FACE_ACTIVATIONS, "silu": "silu", "swish": "silu"}
_TORCH = frozenset({"Linear", "Embedding", "LayerNorm", "Dropout", "ModuleList", "GELU", "ReLU", "SiLU"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where torch keeps what is called around a module's forward."""
_SHARED = frozenset({"transformers.pytorch_utils", "transformers.activations"})
"""Modules of transformers that several families take classes from."""
REMEDY = "use the model's own generate()"


@torch.no_grad()  # a graph would hold the weights as they are now, and a later training could not cut them
def read_decoder(model: nn.Module) -> Decoder:
    """The model's sizes and weights.

    UsageError for a family, or an option of one, that is not known here, and for a model that does more than its
    weights say.
    """
    kind = type(model)
    reader = _FOREIGN.get(kind.__name__)
    if kind in _OWN:
        reader = _OWN[kind]
    elif reader is None or not kind.__module__.startswith("transformers.models.") or not hasattr(model, "config"):
        known = ", ".join(["GPT2 and TransformerLM of flatout.models", *_FOREIGN])
        raise UsageError(
            f"the model is a {kind.__name__} of {kind.__module__}",
            limit=f"generation with a cache knows {known} of transformers, and no class derived from them",
            remedy=REMEDY,
        )
    check_plain(model)
    decoder = reader(model)
    check_all_read(model, decoder.tensors())
    return decoder


def check_causal(model: nn.Module) -> None:
    """UsageError for a model in which a token sees those after it."""
    if isinstance(model, BertMaskedLM) or (isinstance(model, TransformerLM) and not model.config.causal):
        what = f"the {type(model).__name__} is not causal"
        remedy = "train a TransformerLM with causal=True"
        raise UsageError(what, limit="a next token follows from those before it", remedy=remedy)


def _own(model: GPT2 | TransformerLM) -> Decoder:
    """The models of flatout.models: pre-norm blocks and a last norm."""
    check_causal(model)
    config = model.config
    head_width = config.width // config.heads
    activation: Activation = "relu"
    if isinstance(model, GPT2):
        family, activation = "GPT-2", model.config.activation
        tokens, positions = model.tokens.weight, model.positions.weight
    else:
        family, embedding = "TransformerLM", model.embedding
        tokens, positions = embedding.tokens.weight.detach() * embedding.scale, embedding.sines
    return Decoder(
        family=f"{family} of flatout.models",
        heads=config.heads,
        kv_heads=config.heads,
        head_width=head_width,
        max_tokens=config.max_tokens,
        norm="layer",
        norm_epsilon=_one_value(model, "eps", model.norm.eps),
        activation=activation,
        attention_scale=head_width**-0.5,
        tokens=tokens,
        positions=positions,
        blocks=tuple(_own_block(block) for block in model.blocks),
        last_norm=_norm(model.norm),
        head=Linear(weights=(model.head.weight[: config.vocab_size],)),
    )


def _own_block(block: nn.Module) -> Block:
    assert isinstance(block, PreNormBlock), "these models are made of them"
    return Block(
        norm1=_norm(block.norm1),
        qkv=_linear(block.attention.qkv),
        out=_linear(block.attention.out),
        norm2=_norm(block.norm2),
        up=_linear(block.feed_forward.up),
        down=_linear(block.feed_forward.down),
    )


_Untyped = Any
"""A module or config of transformers, whose classes are not imported here."""


def _hugging_face_gpt2(model: _Untyped) -> Decoder:
    config = model.config
    _require(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    body = model.transformer
    head_width = config.n_embd // config.n_head
    return Decoder(
        family="GPT-2 of transformers",
        heads=config.n_head,
        kv_heads=config.n_head,
        head_width=head_width,
        max_tokens=config.n_positions,
        norm="layer",
        norm_epsilon=_one_value(model, "eps", body.ln_f.eps),
        activation=_activation(config.activation_function),
        attention_scale=_one_value(model, "scaling", head_width**-0.5),
        tokens=body.wte.weight,
        positions=body.wpe.weight,
        blocks=tuple(
            Block(
                norm1=_norm(block.ln_1),
                qkv=_transposed(block.attn.c_attn),
                out=_transposed(block.attn.c_proj),
                norm2=_norm(block.ln_2),
                up=_transposed(block.mlp.c_fc),
                down=_transposed(block.mlp.c_proj),
            )
            for block in body.h
        ),
        last_norm=_norm(body.ln_f),
        head=_linear(model.lm_head),
    )


def _hugging_face_llama(model: _Untyped) -> Decoder:
    """Llama and its derivatives: rms norms, rotary positions, gated feed-forward, grouped kv heads."""
    config, body = model.config, model.model
    cosines, sines_ = _rotary(body.rotary_emb, config.max_position_embeddings)
    first = body.layers[0].self_attn
    return Decoder(
        family=f"{type(model).__name__.removesuffix('ForCausalLM')} of transformers",
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=first.head_dim,
        max_tokens=config.max_position_embeddings,
        norm="rms",
        norm_epsilon=_one_value(model, "variance_epsilon", body.norm.variance_epsilon),
        activation=_activation(config.hidden_act),
        attention_scale=_one_value(model, "scaling", float(first.scaling)),
        tokens=body.embed_tokens.weight,
        cosines=cosines,
        sines=sines_,
        blocks=tuple(_llama_block(layer, config) for layer in body.layers),
        last_norm=_norm(body.norm),
        head=_linear(model.lm_head),
    )


def _llama_block(layer: _Untyped, config: _Untyped) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if window is None and type(layer).__name__.startswith("Mistral"):
        window = config.sliding_window  # in every layer, and written in the config alone
    norms = {
        ours: getattr(attention, theirs).weight
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm"))
        if hasattr(attention, theirs)
    }
    return Block(
        norm1=_norm(layer.input_layernorm),
        qkv=_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        out=_linear(attention.o_proj),
        norm2=_norm(layer.post_attention_layernorm),
        up=_linear(mlp.up_proj),
        gate=_linear(mlp.gate_proj),
        down=_linear(mlp.down_proj),
        window=window,
        **norms,
    )


_OWN: dict[type[nn.Module], Callable[..., Decoder]] = {GPT2: _own, TransformerLM: _own}
_FOREIGN: dict[str, Callable[..., Decoder]] = {
    "GPT2LMHeadModel": _hugging_face_gpt2,
    "LlamaForCausalLM": _hugging_face_llama,
    "MistralForCausalLM": _hugging_face_llama,
    "Qwen2ForCausalLM": _hugging_face_llama,
    "Qwen3ForCausalLM": _hugging_face_llama,
}


def _rotary(module: nn.Module, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The model's own angles for every position, computed by itself: cosines and sines [max_tokens, half]."""
    kind = getattr(module, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        limit = "they must be the same for a text of any length"
        raise UsageError(f"the model's rotary positions are {kind!r}", limit=limit, remedy="use its own generate()")
    places = torch.arange(max_tokens, device=module.get_buffer("inv_freq").device)
    with torch.no_grad():
        cosines, sines_ = module(torch.zeros(1, dtype=torch.float32, device=places.device), places[None])
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines_[0, :, :half].contiguous()


def _require(config: object, **values: object) -> None:
    for name, wanted in values.items():
        if getattr(config, name, wanted) != wanted:
            what = f"the config's {name} is {getattr(config, name)!r}"
            raise UsageError(what, limit=f"generation here knows {wanted!r}", remedy=REMEDY)


def _one_value(model: nn.Module, attribute: str, wanted: float) -> float:
    """The value that every module with this attribute has: each of them was made with the same."""
    for name, module in model.named_modules():
        found = vars(module).get(attribute, wanted)
        if found != wanted:
            limit = f"generation here takes one value for all layers, {wanted:g}"
            raise UsageError(f"{name}.{attribute} is {found!r}", limit=limit, remedy=REMEDY)
    return float(wanted)


def _activation(name: object) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        limit = f"generation here knows {', '.join(_ACTIVATIONS)}"
        raise UsageError(f"the config's activation is {name!r}", limit=limit, remedy=REMEDY)
    return _ACTIVATIONS[name]


class _Weighted(Protocol):
    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


def _norm(module: _Weighted) -> Norm:
    return Norm(weight=module.weight, bias=getattr(module, "bias", None))


def _linear(*modules: _Weighted) -> Linear:
    """Of one module, or of several with concatenated outputs."""
    return Linear(weights=tuple(one.weight for one in modules), biases=tuple(one.bias for one in modules))


def _transposed(module: _Weighted) -> Linear:
    """transformers' Conv1D holds [inputs, outputs]."""
    return Linear(weights=(module.weight.t(),), biases=(module.bias,))


def check_plain(model: nn.Module) -> None:
    """UsageError that names the first module or weight which may do something that its weights do not say."""
    family = type(model).__module__
    for name, module in model.named_modules():
        here = f"{name or 'the model'} ({type(module).__name__})"
        _check_class(here, module, family)
        if "forward" in vars(module):
            raise _not_plain(f"{here} has a forward of its own", "take it off (del module.forward)")
        for hooks in HOOKS:
            if getattr(module, hooks):
                kind = hooks.removeprefix("_forward_").replace("_", "-").removesuffix("s")
                raise _not_plain(f"{here} has a forward {kind}", "remove it while generating")
    for name, tensor in model.named_parameters():
        _check_tensor(name, tensor)


def check_all_read(model: nn.Module, read: list[Tensor]) -> None:
    """UsageError for a weight that no reader has looked at: it does something that is not known here."""
    known = {_storage(tensor) for tensor in read}
    for name, parameter in model.named_parameters():
        if _storage(parameter) not in known:
            raise _not_plain(f"the weight {name} was not expected", "take it out of the model")


def _check_class(here: str, module: nn.Module, family: str) -> None:
    kind = type(module)
    home = kind.__module__
    if hasattr(module, "parametrizations"):
        raise _not_plain(f"{here} has a parametrization", "remove it with torch.nn.utils.parametrize")
    if home.startswith("torch.nn.modules."):
        known = kind.__name__ in _TORCH
    else:
        known = home == family or home.startswith("flatout.models.") or home in _SHARED
    genuine = getattr(sys.modules.get(home), kind.__name__, None) is kind
    if not (known and genuine):
        what = f"{here} is of the class {home}.{kind.__qualname__}"
        raise _not_plain(what, "merge adapters into the weights (merge_and_unload() in peft)")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (nn.Parameter, Tensor):
        raise _not_plain(f"the weight {name} is a {type(tensor).__name__}", "load the model without quantisation")
    if not tensor.is_floating_point():
        raise _not_plain(f"the weight {name} is {tensor.dtype}", "load the model without quantisation")


def _not_plain(what: str, remedy: str) -> UsageError:
    limit = "generation here reads weights, and knows only what the model's own classes do with them"
    return UsageError(what, limit=limit, remedy=f"{remedy}, or {REMEDY}")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else id(tensor)
