"""Checks of model configs; each error names the field, its value, the limit and a remedy.

>>> check_heads("BertConfig", width=100, heads=12)
Traceback (most recent call last):
flatout.errors.UsageError: BertConfig: width is 100 with 12 heads; ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar, get_args

from flatout.errors import UsageError
from flatout.models.feed_forward import activation_from_hugging_face

C = TypeVar("C")


def _wrong(config: object, name: str, limit: str, remedy: str = "") -> UsageError:
    return UsageError(f"{type(config).__name__}: {name} is {getattr(config, name)!r}", limit=limit, remedy=remedy)


def check_whole(config: object, *names: str) -> None:
    """These fields are whole numbers of at least 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _wrong(config, name, "it must be a whole number of at least 1")


def check_share(config: object, *names: str) -> None:
    """These fields are probabilities below 1: dropping everything leaves nothing to learn from."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise _wrong(config, name, "it must be at least 0 and below 1", "0.0 switches it off")


def check_above_zero(config: object, *names: str) -> None:
    """These fields are finite numbers above 0."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise _wrong(config, name, "it must be a finite number above 0")


def check_widths(config: object, name: str, *, low: int) -> None:
    """This field is a tuple of at least `low` whole numbers above 0."""
    values = getattr(config, name)
    right = isinstance(values, tuple) and len(values) >= low
    if not right or any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
        raise _wrong(config, name, f"it must be a tuple of at least {low} whole numbers above 0")


def check_flag(config: object, *names: str) -> None:
    """These fields are true or false."""
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise _wrong(config, name, "it must be True or False")


def check_word(config: object, name: str, words: object) -> None:
    """This field is one of the words of a Literal."""
    if getattr(config, name) not in get_args(words):
        raise _wrong(config, name, f"it must be one of {', '.join(map(repr, get_args(words)))}")


def check_heads(owner: str, *, width: int, heads: int) -> None:
    """The width is divisible by the number of heads."""
    if width % heads:
        fitting = max(count for count in range(1, min(heads, width) + 1) if width % count == 0)
        limit = f"each head needs the same whole share, and {width} / {heads} is {width / heads:.2f}"
        remedy = f"set heads to {fitting}, or width to {math.ceil(width / heads) * heads}"
        raise UsageError(f"{owner}: width is {width} with {heads} heads", limit=limit, remedy=remedy)


def config_of(kind: Callable[..., C], fields: Mapping[str, object]) -> C:
    """A config with these fields, whose types it checks itself."""
    return kind(**fields)


def config_from_hugging_face(
    kind: Callable[..., C],
    values: Mapping[str, object],
    *,
    model_type: str,
    required: Mapping[str, Collection[object]],
    names: Mapping[str, str],
) -> C:
    """Our config from a transformers config as a dict; a field that it lacks keeps our default.

    `required` holds what changes the computation: name -> the values that are supported. `names` is theirs -> ours.
    """
    if not isinstance(values, Mapping):
        remedy = "pass model.config.to_dict(), or the content of config.json"
        raise UsageError(f"the config is a {type(values).__name__}", limit="it must be a dict", remedy=remedy)
    for name, allowed in {"model_type": (model_type,), **required}.items():
        if name in values and values[name] not in allowed:
            limit = f"supported: {', '.join(map(repr, allowed))}"
            remedy = "use a model that was trained that way, or transformers itself for this one"
            raise UsageError(f"the {model_type} config has {name} = {values[name]!r}", limit=limit, remedy=remedy)
    fields = {ours: values[theirs] for theirs, ours in names.items() if values.get(theirs) is not None}
    if "activation" in fields:
        fields["activation"] = activation_from_hugging_face(fields["activation"])
    return kind(**fields)
