"""Compares a prepared model with the model itself: the logits of a few tokens, the last ones through the cache.

What a model computes is known here by its class. That is checked (families.py), but a class can be patched, and
two releases of a library may differ: the numbers decide. The weights as they were read are run in the model's own
precision by torch's operations, where they must agree closely; then the form that generates, within what its bits can
do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.evaluation_mode import evaluating
from flatout.infer.generation.cache import CachedEngine
from flatout.infer.generation.decoder import Storage
from flatout.infer.generation.families import REMEDY
from flatout.infer.generation.torch_decoder import TorchDecoder
from flatout.infer.prediction.calling import forward_parameters
from flatout.precision.matmul import current_matmul_precision
from flatout.precision.outputs import difference

TOKENS, THROUGH_CACHE = 5, 1
"""Tokens read, and how many of them in a pass of their own over the keys and values of those before."""
LIMITS: dict[Storage, float] = {"fp32": 2e-3, "bf16": 0.15, "int8": 0.5, "int4": 1.0}
"""Storage -> the most by which logits may differ, as a share of their spread. Rounding alone stays well below; logits
that have nothing to do with each other differ by 1.4."""


def check_against_model(model: nn.Module, engine: CachedEngine) -> None:
    """UsageError where logits differ by more than LIMITS; those that are not finite are for generation to report."""
    decoder, device, form = engine.decoder, engine.device, engine.storage
    count = min(TOKENS, decoder.max_tokens)
    cut = max(1, count - THROUGH_CACHE)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(decoder.vocabulary, (count,), generator=generator, device="cpu").to(device)
    wanted = _own_logits(model, tokens)
    if not wanted.isfinite().all():
        return
    own: Storage = "fp32" if decoder.tokens.dtype in (torch.float32, torch.float64) else "bf16"
    full = own == "fp32" and current_matmul_precision() == "highest"
    closeness = LIMITS["fp32" if full else "bf16"]
    if form == "fp32":
        _compare(engine.logits(tokens, cut), wanted, closeness, "the weights as they were read")
        return
    read = TorchDecoder(decoder, storage=own, device=device).logits(tokens)
    _compare(read, wanted, closeness, "the weights as they were read")
    _compare(engine.logits(tokens, cut), read, LIMITS[form], f"the weights in {form}")


def _compare(found: Tensor, wanted: Tensor, most: float, what: str) -> None:
    off = difference(found, wanted)
    if not off <= most:
        place = int((found - wanted).square().mean(-1).argmax())
        what = f"with {what}, the logits of a test prompt differ from the model's by {off:.1%} of their spread"
        limit = f"{most:.1%} is allowed; token {place} differs most"
        remedy = f"look for what changes the forward pass of its class or of torch; {REMEDY}"
        raise UsageError(what, limit=limit, remedy=remedy)


def _own_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """fp32 [tokens, vocabulary], by the model's own forward pass without dropout."""
    options = {"use_cache": False} if "use_cache" in forward_parameters(model) else {}
    with evaluating(model), torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        found = model(tokens[None], **options)
    logits = getattr(found, "logits", found)
    assert isinstance(logits, Tensor), "a causal language model gives logits"
    return logits[0].float()
