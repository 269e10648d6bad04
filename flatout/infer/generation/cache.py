"""The key-value cache, allocated at full length, so that nothing moves while it grows; and what engines that have one
share.

A slot holds one sequence; position p of it is row p. Positions past a sequence's end are never read, so a slot is
reused, or truncated after a wrong guess, without being cleared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.infer.generation.decoder import Decoder, Storage
from flatout.infer.generation.share import Work


@dataclass(frozen=True, kw_only=True)
class Span:
    """`length` tokens of the sequence in `slot` of the cache, the first at position `start`."""

    slot: int
    start: int
    length: int = 1


LENGTH_STEP = 16
"""Lengths are multiples of it: the native kernel stores keys in panels of this size."""


class KeyValueCache:
    """Tensors [slots, kv heads, length, head width], one of keys and one of values for each block.

    How keys lie within a slot's plane [length, head width] is the business of who reads and writes them.
    """

    def __init__(
        self, decoder: Decoder, *, slots: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if length > decoder.max_tokens:
            what = f"a cache of {length} tokens"
            raise UsageError(what, limit=f"the model reads at most {decoder.max_tokens}")
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        shape = (slots, decoder.kv_heads, length, decoder.head_width)
        self.slots, self.length, self.dtype = slots, length, dtype
        count = len(decoder.blocks)
        with torch.inference_mode(False):  # what is made in it can be written to only there, and caches are used again
            self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
            self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]

    def check(self, span: Span) -> None:
        """UsageError where these places are not in the cache."""
        if not 0 <= span.slot < self.slots:
            raise UsageError(f"slot {span.slot}", limit=f"the cache has slots 0 to {self.slots - 1}")
        if span.length < 1 or span.start < 0 or span.start + span.length > self.length:
            what = f"{span.length} tokens from position {span.start}"
            raise UsageError(what, limit=f"the cache holds positions 0 to {self.length - 1}")


class CachedEngine(ABC):
    """A decoder's weights, as one kind of kernel reads them. What runs passes is `with_cache`, one for each cache; they
    share the weights."""

    encodes = False

    def __init__(self, decoder: Decoder, storage: Storage, device: torch.device) -> None:
        self.decoder, self.storage, self.device = decoder, storage, device
        self.vocabulary, self.max_tokens = decoder.vocabulary, decoder.max_tokens
        self.weight_bytes = 0
        """Read in every pass: the matrices with their scales."""

    @abstractmethod
    def with_cache(self, cache: KeyValueCache) -> CachedPasses:
        """Passes that keep what they read in this cache."""

    def passes(self, slots: int, length: int) -> CachedPasses:
        """The same with a new cache for `slots` sequences of this length."""
        dtype = torch.float32 if self.storage == "fp32" else torch.bfloat16
        return self.with_cache(KeyValueCache(self.decoder, slots=slots, length=length, dtype=dtype, device=self.device))

    def logits(self, tokens: Tensor, cut: int = 0) -> Tensor:
        """fp32 [tokens, vocabulary]: after each token of one text, of which the first `cut` get a pass of their own."""
        passes = self.passes(1, len(tokens))
        found = []
        for start, part in ((0, tokens[:cut]), (cut, tokens[cut:])):
            if len(part):
                found.append(passes.advance(part, [Span(slot=0, start=start, length=len(part))], every=True))
        return torch.cat(found)


class CachedPasses(ABC):
    """Passes over one cache. Several may run at once, in threads too, each with a cache of its own."""

    note = ""

    def __init__(self, of: CachedEngine, cache: KeyValueCache) -> None:
        self._of, self.cache = of, cache
        self.decoder, self.device, self.slots = of.decoder, of.device, cache.slots

    def work(self) -> Work:
        """Nothing yet: for passes to be added to."""
        of, cache = self._of, self.cache
        return Work(of.decoder, of.storage, of.weight_bytes, cache.dtype.itemsize, cache.keys[0].is_cuda)

    @abstractmethod
    def advance(self, tokens: Tensor, spans: Sequence[Span], *, every: bool = False) -> Tensor:
        """Read tokens, int64 [sum of the spans' lengths] on the device; their keys and values go into the cache.

        Returns logits, fp32: of each span's last token [spans, vocabulary], or of every token [tokens, vocabulary].
        """
