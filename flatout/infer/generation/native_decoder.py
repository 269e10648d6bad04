"""Runs a decoder on the CPU by the native kernel: all layers of a pass in one call, the weights read once.

Sums, norms, softmax and what flows between blocks are fp32 in every precision; the weights are held, and the products
made, in fp32, bf16, int8 or int4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.infer.generation.cache import CachedEngine, CachedPasses, KeyValueCache, Span
from flatout.infer.generation.decoder import Block, Decoder, Linear, Storage, storage_of_head
from flatout.kernels.decoder_pass import ACTIVATIONS, NORMS, DecoderStruct, LayerStruct, run_pass
from flatout.kernels.panels import BFLOAT16, FLOAT, INT4, INT8, Panels, WeightStruct, pack, pointer
from flatout.precision.quantize import INT4_GROUP

_FORMS: dict[Storage, int] = {"fp32": FLOAT, "bf16": BFLOAT16, "int8": INT8, "int4": INT4}

ROWS_PER_PASS = 128
"""A longer prompt goes through in parts: the inputs of one stay in the processor's caches."""

BYTES_PER_THREAD = 2**20
"""Weight bytes per thread below which another thread costs more than it gains."""


class NativeDecoder(CachedEngine):
    """A decoder's weights in panels."""

    def __init__(self, decoder: Decoder, *, storage: Storage, threads: int | None = None) -> None:
        super().__init__(decoder, storage, torch.device("cpu"))
        self.threads = threads
        self._kept: list[object] = []
        """What C points into."""
        self.tokens = decoder.tokens.detach()
        self.positions = None if decoder.positions is None else decoder.positions.detach()
        self.layers = (LayerStruct * len(decoder.blocks))(*(self._layer(block) for block in decoder.blocks))
        self.struct = self._fill()

    def with_cache(self, cache: KeyValueCache) -> NativePasses:
        return NativePasses(self, cache)

    # inside

    def _fill(self) -> DecoderStruct:
        decoder = self.decoder
        return DecoderStruct(
            decoder.width,
            decoder.heads,
            decoder.kv_heads,
            decoder.head_width,
            decoder.inner,
            len(decoder.blocks),
            decoder.vocabulary,
            NORMS[decoder.norm],
            ACTIVATIONS[decoder.activation],
            0 if decoder.cosines is None else 2 * decoder.cosines.shape[1],
            0,  # of the cache: see NativePasses
            0,
            decoder.norm_epsilon,
            decoder.attention_scale,
            self._floats(decoder.cosines),
            self._floats(decoder.sines),
            ctypes.addressof(self.layers),
            self._floats(decoder.last_norm.weight),
            self._floats(decoder.last_norm.bias),
            self._weight(decoder.head, storage_of_head(self.storage)),
        )

    def _layer(self, block: Block) -> LayerStruct:
        norms = (block.norm1.weight, block.norm1.bias, block.norm2.weight, block.norm2.bias)
        floats = [self._floats(one) for one in (*norms, block.query_norm, block.key_norm)]
        linears = (block.qkv, block.out, block.up, block.gate, block.down)
        weights = [self._weight(one, self.storage) for one in linears]
        return LayerStruct(*floats, *weights, block.window or 0)

    def _weight(self, linear: Linear | None, storage: Storage) -> WeightStruct:
        if linear is None:
            return WeightStruct()
        panels = packed(linear, storage)
        self._kept.append(panels)
        self.weight_bytes += panels.nbytes
        return panels.struct()

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        floats = tensor.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._kept.append(floats)
        return pointer(floats)


class NativePasses(CachedPasses):
    _of: NativeDecoder

    def __init__(self, of: NativeDecoder, cache: KeyValueCache) -> None:
        super().__init__(of, cache)
        self._layers = type(of.layers).from_buffer_copy(of.layers)
        self._struct = DecoderStruct.from_buffer_copy(of.struct)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._struct.layer = ctypes.addressof(self._layers)
        self._struct.cache_is_bf16 = int(cache.dtype == torch.bfloat16)
        self._struct.cache_length = cache.length

    def advance(self, tokens: Tensor, spans: Sequence[Span], *, every: bool = False) -> Tensor:
        for span in spans:  # the kernel does not check where it writes
            self.cache.check(span)
        threads = self._threads_for(len(tokens))
        slots = torch.tensor([span.slot for span in spans for _ in range(span.length)], device=self.device)
        places = [place for span in spans for place in range(span.start, span.start + span.length)]
        positions = torch.tensor(places, device=self.device)
        ends = torch.tensor([span.length for span in spans], device=self.device).cumsum(0) - 1
        wanted = list(range(len(places))) if every else ends.tolist()
        x = F.embedding(tokens, self._of.tokens).float()
        if self._of.positions is not None:
            x = x + F.embedding(positions, self._of.positions).float()
        parts = []
        for begin in range(0, len(positions), ROWS_PER_PASS):
            rows = slice(begin, begin + ROWS_PER_PASS)
            here = [row - begin for row in wanted if 0 <= row - begin < ROWS_PER_PASS]
            logits_of = torch.tensor(here, dtype=torch.int64, device=self.device)
            part = x[rows].contiguous()
            parts.append(run_pass(self._struct, part, slots[rows], positions[rows], logits_of, threads))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _threads_for(self, rows: int) -> int:
        """A pass over a small model is shorter than synchronising several threads."""
        work = self._of.weight_bytes * max(1, min(rows, ROWS_PER_PASS) // 8)
        return max(1, min(self._of.threads or torch.get_num_threads(), work // BYTES_PER_THREAD))


def packed(linear: Linear, storage: Storage) -> Panels:
    """A linear layer's weights in panels. Where inputs are no whole number of int4's groups, it is left in 8 bits."""
    form = _FORMS[storage]
    if form == INT4 and linear.inputs % INT4_GROUP:
        form = INT8
    return pack(linear.weights, linear.bias(), form)
