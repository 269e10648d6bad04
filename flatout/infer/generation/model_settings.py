"""What a model's generation_config says about generation: each setting is applied, or refused by name.

A model of transformers comes with its authors' settings, and its own `generate` applies them. Ignoring them silently
would change even a greedy text. So each setting is one of three: applied, without effect on the text, or refused with
its value. The caller's settings take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.errors import UsageError
from flatout.infer.generation.token_ids import whole_number

_RULES = (
    *("min_new_tokens", "min_length", "suppress_tokens", "begin_suppress_tokens"),
    *("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": ([], ()),
    "begin_suppress_tokens": ([], ()),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "guidance_scale": (1, 1.0),
    "penalty_alpha": (0, 0.0),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "token_healing": (False,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
}
"""Setting -> values that are equivalent to unset."""
_WITHOUT_EFFECT = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "use_mtp"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("transformers_version", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type"),
        *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),  # of beams, which are refused
        *("decoder_start_token_id", "bos_token_id"),
        "renormalize_logits",  # adds the same number to all logits of a row
        "remove_invalid_values",  # logits that are not finite raise NumericsError here
    }
)
_HANDLED = frozenset(
    {
        *_RULES,
        *("eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p"),
        *("repetition_penalty", "no_repeat_ngram_size", "max_new_tokens", "max_length", "stop_strings"),
    }
)
_ONLY_SAMPLING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Refused where tokens are drawn; a greedy text does not depend on them."""
_DEFAULT_TOP_K = 50
"""What transformers keeps where do_sample is set and top_k is not."""


_Read = Callable[[str], Any]  # a config of transformers may hold any type; each use checks it
"""Name -> value, None where it is not set."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Of a model's generation_config; empty for a model without one."""

    end_tokens: tuple[int, ...] = ()
    pad_token: int | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Fields of Sampling."""
    rules: Mapping[str, object] = field(default_factory=dict)
    """Fields of TokenRules."""
    max_new_tokens: int | None = None
    max_length: int | None = None
    """Prompt and new tokens together; ignored if max_new_tokens is set."""
    stop_strings: tuple[str, ...] = ()
    decoder_start_token: int | None = None
    """What an encoder-decoder's text begins with, before the first generated token."""

    @property
    def taken(self) -> dict[str, object]:
        """Everything that changes texts, by name, for the result to say."""
        limits = {"max_new_tokens": self.max_new_tokens, "max_length": self.max_length}
        found = {**self.sampling, **self.rules, **limits, "stop_strings": self.stop_strings or None}
        return {name: value for name, value in found.items() if value is not None}


def read_settings(model: object, given: Mapping[str, object], *, encodes: bool = False) -> ModelSettings:
    """`given`: what the caller set, which goes before. encodes: whether the model is an encoder-decoder.

    UsageError for a setting that cannot be carried out here.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        config = getattr(model, "config", None)
        named = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        return ModelSettings(end_tokens=_tokens(named.get("eos_token_id", getattr(config, "eos_token_id", None))))
    _check_kind(config)
    value = _reader(config)
    temperature = given.get("temperature")
    greedy = not value("do_sample") if temperature is None else isinstance(temperature, int | float) and not temperature
    sampled = not greedy
    _refuse_others(config, value, sampled)
    ngram = value("no_repeat_ngram_size")
    sampling = {"repetition_penalty": value("repetition_penalty"), "no_repeat_ngram": ngram}
    if sampled:
        sampling |= _drawing(value, given)
    most = value("max_new_tokens")
    least = value("min_new_tokens")
    rules = {name: value(name) for name in _RULES if not (name == "min_length" and least is not None)}
    stops = None if given.get("stop") is not None else value("stop_strings")
    return ModelSettings(
        end_tokens=_tokens(value("eos_token_id")),
        pad_token=value("pad_token_id"),
        sampling={name: one for name, one in sampling.items() if one is not None and given.get(name) is None},
        rules={name: one for name, one in rules.items() if one is not None and given.get(name) is None},
        max_new_tokens=most if given.get("max_new_tokens") is None else None,
        max_length=_most_in_all(config) if most is None and given.get("max_new_tokens") is None else None,
        stop_strings=(stops,) if isinstance(stops, str) else tuple(stops or ()),
        decoder_start_token=_start(value) if encodes else None,
    )


def _check_kind(config: object) -> None:
    """UsageError for a model's attribute of this name that is something else: none of it would be carried out."""
    try:
        vars(config), vars(type(config)())
    except TypeError as error:
        what = f"the model's generation_config is a {type(config).__name__}"
        limit = "settings are read from a GenerationConfig of transformers"
        remedy = "set model.generation_config = None, and pass the settings to generate"
        raise UsageError(what, limit=limit, remedy=remedy) from error


def _drawing(value: _Read, given: Mapping[str, object]) -> dict[str, object]:
    """As transformers draws. Its own default of top_k belongs to do_sample, not to a temperature of the caller's."""
    temperature, top_k, top_p = value("temperature"), value("top_k"), value("top_p")
    if given.get("temperature") is None and temperature == 0:  # top_k below may be of nobody's choosing
        what = f"the model's generation_config has do_sample = True with temperature = {temperature!r}"
        remedy = "pass temperature=0 for greedy text, or 0.7 to 1.0 to sample"
        raise UsageError(what, limit="drawing takes a temperature above 0", remedy=remedy)
    if given.get("temperature") is None and top_k is None:
        top_k = _DEFAULT_TOP_K
    return {
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": top_k or None,
        "top_p": None if top_p is None or top_p >= 1 else top_p,
        "min_p": value("min_p"),
    }


def _most_in_all(config: object) -> int | None:
    """max_length, where somebody set it: some releases of transformers have it at 20 in every config."""
    found: int | None = getattr(config, "max_length", None)
    return None if found == getattr(type(config)(), "max_length", None) else found


def _refuse_others(config: object, value: _Read, sampled: bool) -> None:
    """Settings that transformers would apply and Flatout does not. Entries unknown to transformers have no effect."""
    known = set(vars(type(config)())) | {"num_beams", "penalty_alpha", "guidance_scale"}
    for name in sorted(set(vars(config)) & known):
        if name.startswith("_") or name in _HANDLED or name in _WITHOUT_EFFECT or value(name) is None:
            continue
        if name in _ONLY_SAMPLING and not sampled:
            continue
        if name == "penalty_alpha" and (sampled or (value("top_k") or _DEFAULT_TOP_K) <= 1):
            continue  # contrastive search is neither drawing nor looking at one candidate
        what = f"the model's generation_config has {name} = {value(name)!r}"
        limit = "generating here cannot carry that out, and without it the text would be another one"
        remedy = (
            f"set model.generation_config.{name} = None (in generation_config.json), or use the model's own generate()"
        )
        raise UsageError(what, limit=limit, remedy=remedy)


def _reader(config: object) -> _Read:
    """name -> value; None where it is not set, or means the same as not being set."""

    def value(name: str) -> object:
        found = getattr(config, name, None)
        return None if found is None or any(found is one or found == one for one in _NEUTRAL.get(name, ())) else found

    return value


def _start(value: _Read) -> int | None:
    """As transformers finds it."""
    start: int | None = value("decoder_start_token_id")
    if start is None:
        start = value("bos_token_id")
    return start


def _tokens(found: object) -> tuple[int, ...]:
    if found is None:
        return ()
    number = isinstance(found, str) or getattr(found, "ndim", 1) == 0  # a tensor or array of a single one
    ids = [whole_number(one) for one in (found if isinstance(found, Iterable) and not number else [found])]
    tokens = tuple(one for one in ids if one is not None)
    if len(tokens) < len(ids):
        limit = "an end token is its id, or a list of ids"
        raise UsageError(f"the model's eos_token_id is {found!r}", limit=limit, remedy="set it in the model's config")
    return tokens
