"""How close generation came to what the machine can do: time at the ceiling over the time it took.

A pass must read its weights and the keys and values of what came before, and must multiply; whichever takes longer at
the ceilings measured on this machine is the limit that binds. Weights that lie in the processor's cache are not read
from memory, so the memory's rate is no ceiling for them: no share is stated then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.infer.generation.decoder import Decoder, Storage
from flatout.infer.generation.generated import Share
from flatout.machine.ceilings import Ceilings
from flatout.machine.detect import detect
from flatout.machine.device import device_name
from flatout.machine.kept_ceilings import load_ceilings
from flatout.units import format_bytes

_PRODUCTS: dict[Storage, str] = {"fp32": "fp32", "bf16": "bf16", "int8": "bf16", "int4": "bf16"}
"""Storage -> dtype whose matrix products are the ceiling: weights in 8 and 4 bits meet inputs of more."""


def known_ceilings(device: torch.device) -> Ceilings | None:
    """Those of this device, measured before; measuring takes seconds and is not for a library call to begin."""
    return load_ceilings(detect(), device_name(device))


def lying_in_cache(weight_bytes: int) -> str:
    """That the weights lie in the processor's cache, in words; '' where they do not, or its size is not known.

    A part stays there as long as they are not much larger than it, and that part is read faster than from memory.
    """
    size = last_cache_bytes()
    if size is None or weight_bytes > 2 * size:
        return ""
    lie = "the weights lie in the cache" if weight_bytes <= size else "the weights lie in the cache in part"
    return f"{lie} ({format_bytes(weight_bytes)}; it holds {format_bytes(size)})"


@functools.cache
def last_cache_bytes() -> int | None:
    """Size of the processor's largest cache; None if unknown."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        number, unit = text[:-1], text[-1:].upper()
        if number.isdecimal() and unit in _UNITS:
            sizes.append(int(number) * _UNITS[unit])
    return max(sizes, default=None)


_UNITS = {"K": 2**10, "M": 2**20}


@dataclass
class UncountedWork:
    """The time of passes of a model that is run by its own forward pass, whose work is not counted."""

    seconds: float = 0.0

    def add(self, spans: list[tuple[int, int]], logit_rows: int, seconds: float) -> None:
        """A pass in `seconds`."""
        self.seconds += seconds

    def share(self, ceilings: Ceilings | None) -> Share:
        """Unknown, and why."""
        why = "the model is run by its own forward pass, which is not counted"
        return Share(of="the ceilings", share=None, why_unknown=why)


@dataclass
class Work:
    """Accumulates the minimum work of passes."""

    decoder: Decoder
    storage: Storage
    weight_bytes: int
    cache_element_bytes: int
    on_gpu: bool = False
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, spans: list[tuple[int, int]], logit_rows: int, seconds: float) -> None:
        """A pass over spans (start, length) in `seconds`."""
        decoder = self.decoder
        tokens = sum(length for _, length in spans)
        head = decoder.head.outputs * decoder.head.inputs
        per_place = decoder.cache_bytes_per_token(self.cache_element_bytes)
        self.bytes += self.weight_bytes + per_place * sum(start + length for start, length in spans)
        pairs = sum(length * start + length * (length + 1) // 2 for start, length in spans)
        attention = 4 * len(decoder.blocks) * decoder.heads * decoder.head_width * pairs
        self.flops += 2 * ((decoder.matrix_weights - head) * tokens + head * logit_rows) + attention
        self.seconds += seconds

    def share(self, ceilings: Ceilings | None) -> Share:
        """Of the limit that binds."""
        dtype = _PRODUCTS[self.storage]
        products = f"matrix products in {dtype}"
        if not self.seconds:
            return Share(of=products, share=None, why_unknown="nothing was timed")
        if ceilings is None:
            remedy = "this device's ceilings are not measured yet (flatout check --measure)"
            return Share(of="the ceilings", share=None, why_unknown=remedy)
        gemm = ceilings.gemm_flops_per_second.get(dtype)
        memory = ceilings.memory_read_bytes_per_second
        if gemm is None or memory is None:
            missing = products if gemm is None else "memory bandwidth"
            return Share(of="the ceilings", share=None, why_unknown=f"the ceiling of {missing} is not known")
        by_memory, by_products = self.bytes / memory.value, self.flops / gemm.value
        in_cache = "" if self.on_gpu else lying_in_cache(self.weight_bytes)
        if in_cache and by_memory >= by_products:
            return Share(of="memory bandwidth", share=None, why_unknown=in_cache)
        of = "memory bandwidth" if by_memory >= by_products else products
        return Share(of=of, share=max(by_memory, by_products) / self.seconds)
