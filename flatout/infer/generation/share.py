"""How near generation came to what the machine can do: time at the ceiling over time taken.

A pass must read its weights and the keys and values of what came before, and must multiply; whichever takes longer at
the ceilings measured on this machine is the limit that binds.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.infer.generation.decoder import Decoder
from flatout.infer.generation.generated import Share
from flatout.infer.generation.storage import Storage
from flatout.machine.ceilings import Ceilings
from flatout.machine.detect import detect

_PRODUCTS: dict[Storage, str] = {"fp32": "fp32", "bf16": "bf16", "int8": "bf16", "int4": "bf16"}
"""Storage -> dtype whose matrix products are the ceiling: weights in 8 and 4 bits meet inputs of more."""


def known_ceilings() -> Ceilings | None:
    """Those measured on this machine before; measuring takes seconds and is not for a library call to begin."""
    return detect().ceilings


@dataclass
class Work:
    """Adds up over passes what they could not do without."""

    decoder: Decoder
    storage: Storage
    weight_bytes: int
    cache_element_bytes: int
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, spans: list[tuple[int, int]], logit_rows: int, seconds: float) -> None:
        """A pass over spans (start, length) in `seconds`."""
        decoder = self.decoder
        tokens = sum(length for _, length in spans)
        head = decoder.head.weight.numel()
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
            remedy = "this machine's ceilings are not measured yet (flatout check --measure)"
            return Share(of="the ceilings", share=None, why_unknown=remedy)
        gemm = ceilings.gemm_flops_per_second.get(dtype)
        memory = ceilings.memory_read_bytes_per_second
        if gemm is None or memory is None:
            missing = products if gemm is None else "memory bandwidth"
            return Share(of="the ceilings", share=None, why_unknown=f"the ceiling of {missing} is not known")
        by_memory, by_products = self.bytes / memory.value, self.flops / gemm.value
        of = "memory bandwidth" if by_memory >= by_products else products
        return Share(of=of, share=max(by_memory, by_products) / self.seconds)
