"""A model made ready for generating: its weights in the form in which they are read fastest, checked against the model.

What was prepared is of use as long as the model stays as it was (weights_seen.py). `kept` remembers it with the model,
so that a second call of `flatout.generate` begins at once; it goes when the model does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import nn

from flatout.errors import PlanError, UsageError
from flatout.infer.generation.cache import KeyValueCache
from flatout.infer.generation.decoder import Decoder
from flatout.infer.generation.families import read_decoder
from flatout.infer.generation.native_decoder import NativeDecoder, NativePasses
from flatout.infer.generation.self_check import check_against_model
from flatout.infer.generation.storage import Storage, storage_of
from flatout.infer.generation.torch_decoder import TorchDecoder, TorchPasses
from flatout.infer.generation.weights_seen import WeightsSeen
from flatout.kernels.native import native
from flatout.plan import Plan

Passes = NativePasses | TorchPasses
CACHE_STEP = 64
"""Cache lengths are multiples of it, so that one cache serves calls of about the same length."""
MOST_FREE = 4
"""Caches that wait for a next call: a server has some calls at a time."""
DEVICES = ("cpu", "cuda")


class Prepared:
    """Of one model under one plan. Any number of runs may use it at once: each has a cache of its own for its time."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        _check_device(model)
        self.seen = WeightsSeen(model)  # before they are read: what changes meanwhile is noticed
        self.engine, self.reason = _engine(model, plan)
        check_against_model(model, self.engine.decoder, self.engine)
        self._free: deque[Passes] = deque()

    @property
    def decoder(self) -> Decoder:
        return self.engine.decoder

    def lease(self, length: int, slots: int) -> Passes:
        """Passes over a cache that holds so many sequences of this length, for one run until it gives them back."""
        length = min(-(-length // CACHE_STEP) * CACHE_STEP, self.decoder.max_tokens)
        too_small: list[Passes] = []
        while self._free:
            try:
                one = self._free.pop()
            except IndexError:  # another thread took the last one
                break
            if one.cache.length >= length and one.cache.slots >= slots:
                self._free.extend(too_small)
                return one
            too_small.append(one)
        self._free.extend(too_small[1:])  # the new one takes the place of one that did not do
        dtype = torch.float32 if self.engine.storage == "fp32" else torch.bfloat16
        device = self.engine.device
        return self.engine.with_cache(
            KeyValueCache(self.decoder, slots=slots, length=length, dtype=dtype, device=device)
        )

    def give_back(self, passes: Passes) -> None:
        if len(self._free) < MOST_FREE:
            self._free.append(passes)


_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Storage, int | None], Prepared]] = weakref.WeakKeyDictionary()
_KEPT_LOCK = threading.RLock()


def kept(model: nn.Module, plan: Plan) -> Prepared:
    """What was prepared for this model before, if neither the model nor how it is to be held has changed; else anew.

    One form is kept for a model. It holds no reference to the model itself.
    """
    key = (storage_of(plan), plan.threads)
    with _KEPT_LOCK:
        found = _KEPT.get(model)
    if found is not None and found[0] == key and not found[1].seen.changed(model):
        return found[1]
    with _KEPT_LOCK:
        _KEPT.pop(model, None)  # before the new one is made: two would not fit where one does
    del found
    prepared = Prepared(model, plan)
    with _KEPT_LOCK:
        _KEPT[model] = (key, prepared)
    return prepared


def _engine(model: nn.Module, plan: Plan) -> tuple[NativeDecoder | TorchDecoder, str]:
    """What runs the model where its weights are, and in words: with the reason, if that is not the fastest."""
    storage = storage_of(plan)
    device = next(model.parameters()).device
    if device.type == "cuda" and storage in ("int8", "int4"):
        limit = "only the CPU has kernels that read them; on CUDA each product would widen the whole matrix first"
        raise PlanError(f"the plan's weights is {storage!r} on {device}", limit=limit, remedy="set precision = 'bf16'")
    decoder = read_decoder(model)
    if device.type == "cuda":
        return TorchDecoder(decoder, storage=storage, device=device), "CUDA graphs"
    kernel = native()
    if kernel.library is None:
        return TorchDecoder(decoder, storage=storage), f"torch's operations, because {kernel.reason}"
    return NativeDecoder(decoder, storage=storage, threads=plan.threads), "native kernel"


def _check_device(model: nn.Module) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in DEVICES:
        names = ", ".join(sorted(map(str, devices))) or "nowhere"
        limit = "they must be on one CPU or CUDA device"
        raise UsageError(f"the model's weights are on {names}", limit=limit, remedy="move it with model.to(...)")
