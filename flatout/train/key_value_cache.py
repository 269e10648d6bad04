"""Models that write keys and values to a cache in every forward, as Hugging Face's decoders do unless told not to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_key_value_cache(model: Any) -> Iterator[None]:
    """A block that is computed again would find its own keys in the cache, and attend to them twice."""
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    caching = [one for one in configs.values() if getattr(one, "use_cache", None) is True]
    for one in caching:
        one.use_cache = False
    try:
        yield
    finally:
        for one in caching:
            one.use_cache = True
