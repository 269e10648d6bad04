"""A model prepared for generation: its weights in the layout that is read fastest, checked against the model.

The prepared form is valid as long as the model does not change (weights_seen.py). `kept` caches it per model, so that a
second call of `flatout.generate` starts at once; it is freed with the model.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from torch import nn

from flatout.errors import UsageError
from flatout.infer.generation.batch_run import Passes
from flatout.infer.generation.cache import CachedEngine, CachedPasses
from flatout.infer.generation.decoder import Decoder, storage_of
from flatout.infer.generation.families import check_causal, read_decoder
from flatout.infer.generation.native_decoder import NativeDecoder
from flatout.infer.generation.own_forward import OwnForward
from flatout.infer.generation.self_check import check_against_model
from flatout.infer.generation.stepping import (
    EncoderDecoderSteps,
    ModelSteps,
    StateEngine,
    is_encoder_decoder,
    recurrent_steps,
)
from flatout.infer.generation.torch_decoder import TorchDecoder
from flatout.infer.generation.weights_seen import WeightsSeen
from flatout.infer.generation.whole_texts import WholeTexts
from flatout.kernels.native import native
from flatout.models.transformer import Seq2SeqTransformer
from flatout.plan import Plan

Engine = CachedEngine | WholeTexts | StateEngine
CACHE_STEP = 64
"""Cache lengths are multiples of it, so that calls of similar length share a cache."""
MOST_FREE = 4
"""Free caches that are kept for later calls: a server has several calls at a time."""
DEVICES = ("cpu", "cuda")


class Prepared:
    """One model under one plan. Several runs may use it at once, each with its own cache."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        _check_device(model)
        self.seen = WeightsSeen(model)  # before they are read, to notice changes in between
        self.engine, self.reason = _engine(model, plan)
        if isinstance(self.engine, CachedEngine):
            check_against_model(model, self.engine)
        else:
            self.seen = WeightsSeen(model, buffers=False)
        self._free: deque[CachedPasses] = deque()

    @property
    def decoder(self) -> Decoder | None:
        """Sizes and weights of a model that was read; None for one that is run by its own forward pass."""
        return self.engine.decoder if isinstance(self.engine, CachedEngine) else None

    def lease(self, length: int, slots: int) -> Passes:
        """Passes with room for `slots` sequences of this length, for one run until it gives them back."""
        if isinstance(self.engine, CachedEngine):
            length = min(-(-length // CACHE_STEP) * CACHE_STEP, self.engine.max_tokens)
        too_small: list[CachedPasses] = []
        while self._free:
            try:
                one = self._free.pop()
            except IndexError:  # another thread took the last one
                break
            if one.cache.length >= length and one.slots >= slots:
                self._free.extend(too_small)
                return one
            too_small.append(one)
        self._free.extend(too_small[1:])  # the new one takes the place of one that did not do
        return self.engine.passes(slots, length)

    def give_back(self, passes: Passes) -> None:
        """Caches are reused; the texts and states of a run are not."""
        if isinstance(passes, CachedPasses) and len(self._free) < MOST_FREE:
            self._free.append(passes)


_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Prepared]] = weakref.WeakKeyDictionary()
_KEPT_LOCK = threading.RLock()


def kept(model: nn.Module, plan: Plan) -> Prepared:
    """The form prepared for this model before, or a new one if the model or the plan has changed.

    One form is kept per model. It holds no reference to the model itself.
    """
    key = (plan.weights, plan.precision, plan.threads)
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


def _engine(model: nn.Module, plan: Plan) -> tuple[Engine, str]:
    """The engine for the model's device and a description, with the reason if it is not the fastest one."""
    if isinstance(model, Seq2SeqTransformer) or is_encoder_decoder(model):
        run = OwnForward(model, plan, "it is an encoder-decoder")
        engine = EncoderDecoderSteps(run) if is_encoder_decoder(model) else ModelSteps(run, method="advance")
        return engine, "the model's own decoder with its cache; each source is encoded once"
    check_causal(model)
    try:
        decoder = read_decoder(model)
    except UsageError as error:
        return _by_own_forward(model, plan, error.what)
    storage = storage_of(plan)
    device = next(model.parameters()).device
    if device.type == "cuda":
        return TorchDecoder(decoder, storage=storage, device=device), "CUDA graphs"
    kernel = native()
    if kernel.library is None:
        return TorchDecoder(decoder, storage=storage), f"torch's operations, because {kernel.reason}"
    return NativeDecoder(decoder, storage=storage, threads=plan.threads), "native kernel"


def _by_own_forward(model: nn.Module, plan: Plan, why: str) -> tuple[Engine, str]:
    """By its state, if it has one; else over the whole text each time. why: why its weights cannot be read."""
    run = OwnForward(model, plan, why)
    steps, no_state = (None, "") if run.from_transformers else recurrent_steps(run)
    if steps is not None:
        what = "its decoder; each source is encoded once" if steps.encodes else "its state after each token"
        return steps, f"the model's own forward pass, by {what}"
    texts = WholeTexts(run)
    if texts.sees_later and hasattr(model, "can_generate"):  # of transformers
        limit = "a next token follows from those before it; a masked or permuted language model is asked in other ways"
        remedy = "use the family's causal class (of BERT, BertLMHeadModel with is_decoder=True), or its own generate()"
        raise UsageError(f"the {type(model).__name__}'s tokens see those after them", limit=limit, remedy=remedy)
    reason = f"the model's own forward pass over the whole text for each token, without a cache, because {why}"
    reason += f" ({no_state})" if no_state else ""
    reason += "; its own generate() has a cache" if run.from_transformers else ""
    reason += "; its tokens see those after them, as of a masked language model" if texts.sees_later else ""
    if not texts.repeats:
        reason += "; it gives two results for one text (it draws random numbers or keeps state between calls), so the "
        reason += "same text may not come again"
    return texts, reason


def _check_device(model: nn.Module) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        return  # it computes without any, on the CPU
    if len(devices) != 1 or next(iter(devices)).type not in DEVICES:
        names = ", ".join(sorted(map(str, devices)))
        limit = "they must be on one CPU or CUDA device"
        raise UsageError(f"the model's weights are on {names}", limit=limit, remedy="move it with model.to(...)")
