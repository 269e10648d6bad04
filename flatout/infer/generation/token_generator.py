"""Text generation for a model as it is: prepared once, then called with any prompts.

>>> import torch
>>> from flatout.models import GPT2, GPT2Config
>>> model = GPT2(GPT2Config(vocab_size=65, max_tokens=32, width=48, heads=3, layers=2)).eval()
>>> made = TokenGenerator(model).generate([[1, 2, 3], [4]], max_new_tokens=5)
>>> [len(tokens) for tokens in made.tokens], made.reasons
([5, 5], ['length', 'length'])
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from flatout.errors import PlanError, UsageError
from flatout.infer.generation.batch_run import BatchRun, Engine, Text
from flatout.infer.generation.cache import KeyValueCache
from flatout.infer.generation.families import read_decoder
from flatout.infer.generation.generated import Generation, Piece, Reason, Speculation
from flatout.infer.generation.guesser import Guesser
from flatout.infer.generation.native_decoder import NativeDecoder
from flatout.infer.generation.prompts import read_prompts
from flatout.infer.generation.sampling import Sampling, Uniforms, fresh_seed
from flatout.infer.generation.share import known_ceilings
from flatout.infer.generation.stopping import Stops, Watch, stops_from
from flatout.infer.generation.storage import storage_of
from flatout.infer.generation.torch_decoder import TorchDecoder
from flatout.infer.tokenizer_source import decode_of
from flatout.kernels.native import native
from flatout.plan import Plan

DEFAULT_SLOTS = {"cpu": 16, "cuda": 64}
"""Sequences that are worked on at once: where a step still costs about what reading the weights costs."""
_OURS = ("precision", "weights", "speculation", "threads")
"""Choices of a plan that are carried out here."""
CACHE_STEP = 64
"""Cache lengths are multiples of it, so that one cache serves calls of about the same length."""


class TokenGenerator:
    """A model's weights in the form in which they are read fastest, and what else generating needs.

    The model's weights are copied as they are now; the model itself is left alone. plan: precision (fp32 unless it
    says bf16), weights (int8, int4), speculation, threads. tokenizer: anything with `encode` and `decode`, where
    prompts or stops are texts. draft: a smaller model of the same vocabulary that guesses tokens ahead; what comes
    out is distributed as without it. slots: sequences worked on at once.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        tokenizer: Any = None,
        draft: nn.Module | None = None,
        slots: int | None = None,
    ) -> None:
        self.plan = plan or Plan()
        _check_plan(self.plan)
        if slots is not None and (not isinstance(slots, int) or slots < 1):
            raise UsageError(f"slots is {slots!r}", limit="it is a whole number of at least 1")
        self.tokenizer = tokenizer
        self._decode = None if tokenizer is None else decode_of(tokenizer)
        self.engine, self.engine_reason = _engine(model, self.plan)
        self.decoder = self.engine.decoder
        self._draft: Engine | None = None
        if draft is not None:
            self._draft = _engine(draft, self.plan)[0]
            _check_draft(self.decoder.vocabulary, self._draft.decoder.vocabulary)
        self._slots = slots

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 64,
        stop: Any = None,
        ignore_end: bool = False,
        progress: Callable[[int, int], None] | None = None,
        pieces: Callable[[Piece], None] | None = None,
        **sampling: Any,
    ) -> Generation:
        """New tokens for every prompt, in the order of the prompts.

        prompts: texts, lists of ids, tensors; see `read_prompts`. stop: a token id, a text, or a list of ids, texts and
        lists of ids; none of it is part of the result, nor is the model's end token, which stops a text unless
        `ignore_end`. progress: called with (texts ended, tokens made); pieces: with each piece as it comes.

        sampling: the fields of Sampling (temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram, seed);
        without a temperature: greedy. A prompt's text depends on the seed and its number, not on the others generated
        with it; only with a draft and a temperature does it depend on when guesses were tried, which time decides.

        UsageError: a prompt or setting that cannot be used. NumericsError: logits that are NaN, +inf or all -inf.
        """
        run, texts, seed = self._run(prompts, max_new_tokens, sampling, stop, ignore_end)
        ended = made = 0
        strings = ["" for _ in texts]
        for piece in run.pieces():
            ended += piece.reason is not None
            made += len(piece.tokens)
            strings[piece.prompt] += piece.text or ""
            if progress is not None:
                progress(ended, made)
            if pieces is not None:
                pieces(piece)
        return self._generation(run, texts, strings if self.tokenizer is not None else None, seed)

    def stream(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 64,
        stop: Any = None,
        ignore_end: bool = False,
        **sampling: Any,
    ) -> Iterator[Piece]:
        """The same as pieces, as they come; those of several prompts take turns."""
        run, _, _ = self._run(prompts, max_new_tokens, sampling, stop, ignore_end)
        return run.pieces()

    # inside

    def _run(
        self, prompts: Any, max_new_tokens: int, settings: dict[str, Any], stop: Any, ignore_end: bool
    ) -> tuple[BatchRun, list[Text], int | None]:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens!r}", limit="it is a whole number of at least 1")
        sampling = _sampling(settings)
        decoder = self.decoder
        ids = read_prompts(
            prompts, tokenizer=self.tokenizer, vocabulary=decoder.vocabulary, max_tokens=decoder.max_tokens
        )
        end = None if ignore_end else [one for one in decoder.end_tokens if one < decoder.vocabulary]
        stops = stops_from(stop, end, self._decode, vocabulary=decoder.vocabulary)
        seed = None if sampling.greedy else fresh_seed() if sampling.seed is None else sampling.seed
        texts = [self._text(index, one, max_new_tokens, stops, seed) for index, one in enumerate(ids)]
        self._open(max(len(text.prompt) + text.limit for text in texts), len(texts))
        return BatchRun(self.engine, sampling, texts, self._guesser(sampling)), texts, seed

    def _text(self, index: int, prompt: list[int], max_new_tokens: int, stops: Stops, seed: int | None) -> Text:
        room = self.decoder.max_tokens - len(prompt)
        limit = min(max_new_tokens, room)
        at_limit: Reason = "length" if limit == max_new_tokens else "context"
        return Text(
            index=index,
            prompt=prompt,
            limit=limit,
            at_limit=at_limit,
            watch=Watch(stops, limit=limit, decode=self._decode, before=prompt),
            uniforms=None if seed is None else Uniforms(seed, [index], limit),
        )

    def _open(self, length: int, texts: int) -> None:
        """A cache that holds these texts: the one there is, if it does."""
        length = min(-(-length // CACHE_STEP) * CACHE_STEP, self.decoder.max_tokens)
        slots = min(self._slots or DEFAULT_SLOTS[self.engine.device.type], texts)
        for engine in (self.engine, self._draft):
            held = None if engine is None else engine.cache
            if engine is None or (held is not None and held.length >= length and held.slots >= slots):
                continue
            dtype = torch.float32 if engine.storage == "fp32" else torch.bfloat16
            own = min(length, engine.decoder.max_tokens)
            engine.open(KeyValueCache(engine.decoder, slots=slots, length=own, dtype=dtype, device=engine.device))

    def _guesser(self, sampling: Sampling) -> Guesser | None:
        wanted = self._draft is not None or self.plan.speculation is not None
        return Guesser(sampling, self._draft) if wanted else None

    def _generation(
        self, run: BatchRun, texts: Sequence[Text], strings: list[str] | None, seed: int | None
    ) -> Generation:
        ceilings = known_ceilings()
        endings = [text.watch.ending for text in texts]
        reasons: list[Reason] = [
            text.at_limit if ending is None or ending.reason == "length" else ending.reason
            for text, ending in zip(texts, endings, strict=True)
        ]
        guesser = run.guesser
        return Generation(
            tokens=[
                text.made[: len(text.made) if ending is None else ending.tokens]
                for text, ending in zip(texts, endings, strict=True)
            ],
            texts=strings,
            reasons=reasons,
            seed=seed,
            prompt_tokens=sum(len(text.prompt) for text in texts),
            generated_tokens=sum(len(text.made) for text in texts),
            prefill_seconds=run.reading.seconds,
            decode_seconds=run.writing.seconds,
            prefill_share=run.reading.share(ceilings),
            decode_share=run.writing.share(ceilings),
            storage=self.engine.storage,
            engine=self.engine_reason,
            speculation=None
            if guesser is None
            else Speculation(proposed=guesser.proposed, accepted=guesser.accepted, passes=run.passes),
        )


def generate(
    model: nn.Module,
    prompts: Any,
    *,
    max_new_tokens: int = 64,
    plan: Plan | None = None,
    stop: Any = None,
    tokenizer: Any = None,
    draft: nn.Module | None = None,
    ignore_end: bool = False,
    **sampling: Any,
) -> Generation:
    """New tokens for every prompt: TokenGenerator's `generate`, with one that is made for this call.

    For several calls make it once: it holds the weights ready.
    """
    generator = TokenGenerator(model, plan, tokenizer=tokenizer, draft=draft)
    return generator.generate(prompts, max_new_tokens=max_new_tokens, stop=stop, ignore_end=ignore_end, **sampling)


def _engine(model: nn.Module, plan: Plan) -> tuple[Engine, str]:
    """What runs the model where its weights are, and in words: with the reason, if that is not the fastest."""
    storage = storage_of(plan)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in DEFAULT_SLOTS:
        names = ", ".join(sorted(map(str, devices))) or "nowhere"
        limit = "they must be on one CPU or CUDA device"
        raise UsageError(f"the model's weights are on {names}", limit=limit, remedy="move it with model.to(...)")
    device = next(iter(devices))
    _check_finite_types(model)
    decoder = read_decoder(model)
    if device.type == "cuda":
        return TorchDecoder(decoder, storage=storage, device=device), "CUDA graphs"
    kernel = native()
    if kernel.library is None:
        return TorchDecoder(decoder, storage=storage), f"torch's operations, because {kernel.reason}"
    return NativeDecoder(decoder, storage=storage, threads=plan.threads), "native kernel"


def _check_finite_types(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            what = f"{name} is {parameter.dtype}"
            limit = "weights are floating point: Flatout quantises them itself"
            raise UsageError(what, limit=limit, remedy="load the model without quantisation")


def _check_plan(plan: Plan) -> None:
    for name, value in plan.choices().items():
        if name not in _OURS:
            limit = f"generating carries out {', '.join(_OURS)}"
            raise PlanError(f"the plan's {name} is {value!r}", limit=limit, remedy=f"use plan.without({name!r})")


def _sampling(settings: dict[str, Any]) -> Sampling:
    known = [one.name for one in fields(Sampling)]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "leave it out"
            raise UsageError(
                f"generating has no setting {name!r}", limit=f"there are {', '.join(known)}", remedy=remedy
            )
    return Sampling(**settings)


def _check_draft(vocabulary: int, of_draft: int) -> None:
    if vocabulary != of_draft:
        what = f"the draft's vocabulary has {of_draft} tokens"
        limit = f"the model's has {vocabulary}, and a guess must mean the same to both"
        raise UsageError(what, limit=limit, remedy="use a draft of the same tokenizer")
