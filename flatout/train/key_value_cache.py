"""Models that write keys and values to a cache in every forward pass, as Hugging Face's decoders do by default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module


@contextlib.contextmanager
def without_key_value_cache(model: Module) -> Iterator[None]:
    """Turn the cache off: a block that is recomputed would find its own keys in it, and attend to them twice."""
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    caching = [one for one in configs.values() if getattr(one, "use_cache", None) is True]
    for one in caching:
        one.use_cache = False
    try:
        yield
    finally:
        for one in caching:
            one.use_cache = True
