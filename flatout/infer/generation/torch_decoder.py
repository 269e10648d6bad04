"""Runs a decoder by torch's own operations: on a GPU, and on a CPU without a C++ compiler.

On a GPU a step of one token a sequence is captured once as a CUDA graph and replayed, so that no time goes into
launching some hundred small kernels, and nothing waits for the host. Sums between blocks are in the dtype of products;
norms and logits in fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.errors import PlanError
from flatout.infer.generation.cache import CachedEngine, CachedPasses, KeyValueCache, Span
from flatout.infer.generation.decoder import Block, Decoder, Linear, Norm, Storage, storage_of_head
from flatout.precision.quantize import INT4_GROUP, quantize_groups_int4, quantize_rows_int8

Matrix = Callable[[Tensor], Tensor]


class TorchDecoder(CachedEngine):
    """A decoder's weights as torch's operations take them."""

    def __init__(self, decoder: Decoder, *, storage: Storage, device: torch.device | str = "cpu") -> None:
        super().__init__(decoder, storage, torch.device(device))
        self.dtype = torch.float32 if storage == "fp32" else torch.bfloat16
        self._tokens = self._moved(decoder.tokens)
        self._positions = None if decoder.positions is None else self._moved(decoder.positions)
        self._angles = None
        if decoder.cosines is not None and decoder.sines is not None:
            self._angles = (decoder.cosines.to(self.device), decoder.sines.to(self.device))
        self._matrices = [
            {name: self._matrix(getattr(block, name), storage) for name in ("qkv", "out", "up", "gate", "down")}
            for block in decoder.blocks
        ]
        self._head = self._matrix(decoder.head, storage_of_head(storage))
        self.captures = self.device.type == "cuda"
        """Whether steps of one token are captured as graphs."""
        self.alone = threading.Lock()
        """One pass at a time on a GPU: what another thread starts meanwhile would end up in a graph being captured."""

    def with_cache(self, cache: KeyValueCache) -> TorchPasses:
        return TorchPasses(self, cache)

    # inside

    @torch.no_grad()
    def forward(
        self, cache: KeyValueCache, tokens: Tensor, slots: Tensor, positions: Tensor, seen: int, every: bool
    ) -> Tensor:
        """int64 tokens and positions [batch, tokens], slots [batch] -> fp32 [batch, tokens or 1, vocabulary].

        `seen`: how much of the cache attention looks at; 0 = the sequences begin here, so nothing of it."""
        decoder = self.decoder
        x = F.embedding(tokens, self._tokens)
        if self._positions is not None:
            x = x + F.embedding(positions, self._positions)
        for index, block in enumerate(decoder.blocks):
            matrices = self._matrices[index]
            qkv = matrices["qkv"](self._normed(x, block.norm1))
            x = x + matrices["out"](self._attention(cache, qkv, index, slots, positions, seen))
            inner = self._normed(x, block.norm2)
            raised = matrices["up"](inner)
            if block.gate is None:
                raised = _activated(raised, decoder.activation)
            else:
                raised = _activated(matrices["gate"](inner), decoder.activation) * raised
            x = x + matrices["down"](raised)
        last = x if every else x[:, -1:]
        return self._head(self._normed(last, decoder.last_norm)).float()

    def _attention(
        self, cache: KeyValueCache, qkv: Tensor, index: int, slots: Tensor, positions: Tensor, seen: int
    ) -> Tensor:
        decoder, block = self.decoder, self.decoder.blocks[index]
        heads = qkv.unflatten(-1, (-1, decoder.head_width)).transpose(1, 2)  # [batch, heads, tokens, head width]
        sizes = (decoder.heads, decoder.kv_heads, decoder.kv_heads)
        queries, keys, values = heads.split(sizes, dim=1)
        queries = self._placed(queries, block.query_norm, positions)
        keys = self._placed(keys, block.key_norm, positions)
        held_keys, held_values = cache.keys[index], cache.values[index]
        held_keys[slots[:, None], :, positions] = keys.transpose(1, 2).to(held_keys.dtype)
        held_values[slots[:, None], :, positions] = values.transpose(1, 2).to(held_values.dtype)
        if seen:
            keys = held_keys[slots, :, :seen].to(queries.dtype)
            values = held_values[slots, :, :seen].to(queries.dtype)
        mask = self._mask(block, positions, seen)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            mask,
            is_causal=mask is None,
            scale=decoder.attention_scale,
            enable_gqa=decoder.heads != decoder.kv_heads,
        )
        return mixed.transpose(1, 2).flatten(2)

    def _mask(self, block: Block, positions: Tensor, seen: int) -> Tensor | None:
        """bool [batch, 1, tokens, keys]: which keys each token sees; None: causality alone."""
        if not seen and block.window is None:
            return None
        keys = torch.arange(seen or positions.shape[1], device=self.device)
        own = positions[:, None, :, None]
        mask = keys <= own
        return mask if block.window is None else mask & (keys > own - block.window)

    def _placed(self, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Queries or keys [batch, heads, tokens, head width], normed and turned to their positions."""
        if norm is not None:
            heads = self._normed(heads, Norm(weight=norm), kind="rms")
        if self._angles is None:
            return heads
        cosines, sines = (table[positions][:, None].to(heads.dtype) for table in self._angles)
        half = cosines.shape[-1]
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), dim=-1)

    def _normed(self, x: Tensor, norm: Norm, kind: str | None = None) -> Tensor:
        weight = norm.weight.to(self.device, torch.float32)
        bias = None if norm.bias is None else norm.bias.to(self.device, torch.float32)
        if (kind or self.decoder.norm) == "layer":
            return F.layer_norm(x.float(), weight.shape, weight, bias, self.decoder.norm_epsilon).to(x.dtype)
        return F.rms_norm(x.float(), weight.shape, weight, self.decoder.norm_epsilon).to(x.dtype)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype)

    def _matrix(self, linear: Linear | None, storage: Storage) -> Matrix:
        if linear is None:
            return lambda x: x
        matrix, size = _matrix(linear, storage, self.device, self.dtype)
        self.weight_bytes += size
        return matrix


class TorchPasses(CachedPasses):
    _of: TorchDecoder

    def __init__(self, of: TorchDecoder, cache: KeyValueCache) -> None:
        super().__init__(of, cache)
        self._graphs: dict[int, _StepGraph] = {}
        """They write where this cache lies."""

    def advance(self, tokens: Tensor, spans: Sequence[Span], *, every: bool = False) -> Tensor:
        with (
            self._of.alone if self.device.type == "cuda" else nullcontext(),
            torch.autocast(self.device.type, enabled=False),  # one around the call is not the plan's
        ):
            if self._of.captures and not every and all(span.length == 1 for span in spans):
                return self._replayed(tokens, spans)
            return self._computed(tokens, spans, every)

    # inside

    def _computed(self, tokens: Tensor, spans: Sequence[Span], every: bool) -> Tensor:
        parts = tokens.split([span.length for span in spans])
        logits: list[Tensor | None] = [None] * len(spans)
        lengths = sorted({span.length for span in spans})
        for length in lengths:  # spans of one length go together, so that nothing is padded
            here = [index for index, span in enumerate(spans) if span.length == length]
            group = [spans[index] for index in here]
            found = self._pass(torch.stack([parts[index] for index in here]), group, every)
            for index, one in zip(here, found.unbind(0), strict=True):
                logits[index] = one
        made = [one for one in logits if one is not None]
        return torch.cat(made) if every else torch.stack([one[-1] for one in made])

    def _pass(self, tokens: Tensor, spans: Sequence[Span], every: bool) -> Tensor:
        """int64 [spans, length] -> fp32 [spans, length or 1, vocabulary]."""
        slots = torch.tensor([span.slot for span in spans], device=self.device)
        starts = torch.tensor([span.start for span in spans], device=self.device)
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        fresh = tokens.shape[1] > 1 and all(span.start == 0 for span in spans)
        end = max(span.start for span in spans) + tokens.shape[1]
        return self._of.forward(self.cache, tokens, slots, positions, 0 if fresh else end, every)

    def _replayed(self, tokens: Tensor, spans: Sequence[Span]) -> Tensor:
        """A step of one token a sequence, as a graph that was captured for this many sequences."""
        graph = self._graphs.get(len(spans))
        if graph is None:
            graph = self._graphs[len(spans)] = _StepGraph(len(spans), self.device, self._step)
        return graph(tokens, spans)

    def _step(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return self._of.forward(self.cache, tokens[:, None], slots, positions[:, None], self.cache.length, False)[:, 0]


class _StepGraph:
    """One step over tensors that stay where they are, captured at its first use."""

    def __init__(self, rows: int, device: torch.device, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        with torch.inference_mode(False):  # a later step may be outside of it
            self._tokens, self._slots, self._positions = (
                torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
            )
        self._expected: list[Span] = []
        """Spans for which slots and positions are already set: those of the last step, advanced by one."""
        self._step = step
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, tokens: Tensor, spans: Sequence[Span]) -> Tensor:
        self._tokens.copy_(tokens)
        if list(spans) != self._expected:
            self._slots.copy_(torch.tensor([span.slot for span in spans], device="cpu"))
            self._positions.copy_(torch.tensor([span.start for span in spans], device="cpu"))
        if self._replay is None:
            self._replay = captured(self._of_held, self._tokens.device)
        logits = self._replay().clone()
        self._positions += 1
        self._expected = [Span(slot=span.slot, start=span.start + 1) for span in spans]
        return logits

    def _of_held(self) -> Tensor:
        return self._step(self._tokens, self._slots, self._positions)


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """A CUDA graph of `step`: returns a function that replays it and returns its result, always in the same memory.

    device: where the step computes, which need not be the current device. The step runs some times before. It writes
    the keys that the replay will, to the same places: that is harmless.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # torch's own stream for this is on the GPU of its first use
            result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _matrix(linear: Linear, storage: Storage, device: torch.device, dtype: torch.dtype) -> tuple[Matrix, int]:
    """A function x -> x @ weight.T + bias in `dtype`, and the bytes that it moves.

    On a CPU without the native kernel fewer bits are widened in each call: the narrow matrix is read, the wide one
    written and read again. Elsewhere they are a PlanError.
    """
    if device.type != "cpu" and storage in ("int8", "int4"):
        limit = "only the CPU has kernels that read them; on CUDA each product would widen the whole matrix first"
        raise PlanError(f"the plan's weights is {storage!r} on {device}", limit=limit, remedy="set precision = 'bf16'")
    wide_bytes = linear.outputs * linear.inputs * dtype.itemsize
    held_bias = linear.bias()
    bias = None if held_bias is None else held_bias.to(device, dtype)
    if storage == "int4" and linear.inputs % INT4_GROUP == 0:
        values, scales = (one.to(device) for one in quantize_groups_int4(linear.weight()))
        narrow = scales.to(dtype)[..., None]

        def in_four_bits(x: Tensor) -> Tensor:
            groups = values.unflatten(1, (-1, INT4_GROUP)).to(dtype) - 8
            return F.linear(x, (groups * narrow).flatten(1), bias)

        return in_four_bits, values.nbytes + narrow.nbytes + 2 * wide_bytes
    if storage in ("int8", "int4"):
        values, scales = (one.to(device) for one in quantize_rows_int8(linear.weight()))
        row_scales = scales.to(dtype)

        def in_eight_bits(x: Tensor) -> Tensor:
            y = F.linear(x, values.to(dtype)) * row_scales
            return y if bias is None else y + bias

        return in_eight_bits, values.nbytes + row_scales.nbytes + 2 * wide_bytes
    weight = linear.weight().to(device, dtype)
    return lambda x: F.linear(x, weight, bias), weight.nbytes


def _activated(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
