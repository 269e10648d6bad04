"""Text generation with a model: prepared once, then called with prompts.

>>> import torch
>>> from flatout.models import GPT2, GPT2Config
>>> model = GPT2(GPT2Config(vocab_size=65, max_tokens=32, width=48, heads=3, layers=2)).eval()
>>> made = TokenGenerator(model).generate([[1, 2, 3], [4]], max_new_tokens=5)
>>> [len(tokens) for tokens in made.tokens], made.reasons
([5, 5], ['length', 'length'])
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from flatout.arguments import as_model, as_plan, as_whole_number
from flatout.errors import PlanError, UsageError
from flatout.infer.generation.batch_run import BatchRun, Text
from flatout.infer.generation.cache import CachedPasses
from flatout.infer.generation.decoder import Decoder
from flatout.infer.generation.generated import Generation, Piece, Speculation
from flatout.infer.generation.model_settings import ModelSettings, read_settings
from flatout.infer.generation.prepared import Engine, Prepared, kept
from flatout.infer.generation.prompts import read_prompts
from flatout.infer.generation.sampling import Sampling, Uniforms, fresh_seed
from flatout.infer.generation.share import known_ceilings
from flatout.infer.generation.speculation import Guesser
from flatout.infer.generation.stopping import Watch, stops_from
from flatout.infer.generation.token_choice import Choice, TokenRules
from flatout.infer.generation.token_ids import plain_number
from flatout.infer.tokenizer_source import Tokenizer, as_tokenizer, decode_of, encode_of
from flatout.plan import Plan

DEFAULT_SLOTS = {"cpu": 16, "cuda": 64}
"""Sequences processed at once: a step still costs about as much as reading the weights."""
MAX_NEW_TOKENS = 64
"""Where neither the caller nor the model says how many."""
_ENDLESS = 1 << 62
"""More tokens than any text gets: tensors hold no larger numbers."""
_ELSEWHERE = {
    "do_sample": "pass temperature=1.0 to sample; without a temperature the text is greedy",
    "eos_token_id": "pass stop=[...] with further tokens that end a text; the model's own end token does anyway",
    "stop_strings": "pass stop=[...]",
    "stop_token_ids": "pass stop=[...]",
    "max_length": "pass max_new_tokens=..., which counts new tokens only",
    "max_tokens": "pass max_new_tokens=...",
    "no_repeat_ngram_size": "did you mean no_repeat_ngram?",
    "pad_token_id": "pass attention_mask=..., or the prompts without padding as lists",
    "slots": "pass it to TokenGenerator(model, slots=...)",
    **dict.fromkeys(("num_beams", "num_return_sequences"), "use the model's own generate()"),
}
"""Names that transformers and other libraries have for a setting -> what does the same here. By its spelling alone
eos_token_id would be taken for forced_eos_token_id, which does something else."""
_SAMPLING: Callable[..., Sampling] = Sampling  # both check their fields themselves
_RULES: Callable[..., TokenRules] = TokenRules


class TokenGenerator:
    """What generating with one model needs, prepared once.

    Models whose layout is known (GPT-2 and TransformerLM of flatout.models; GPT-2, Llama, Mistral, Qwen2 and Qwen3 of
    transformers) have their weights read, in the form in which they are read fastest. Other models are run by their own
    forward pass, and the result's `engine` says how and why:

    - with a state, where it keeps one (CharacterGenerator, any recurrent model: see stepping.py for the protocol);
    - an encoder-decoder (Seq2SeqTransformer, T5, BART) by its decoder's cache, each source encoded once;
    - else, for logits [batch, tokens, vocabulary], without a cache: the whole text is recomputed for each token.

    The constructor checks the model: the logits of a few tokens against the model's own (UsageError says what differs).
    The model is not changed. Before each text the weights are checked for changes (a training step,
    `load_state_dict`) and prepared again if need be, so that a text is always that of the current model. Weights that
    change while a text is being generated are an error.

    The settings of the model's `generation_config` are the defaults, as in transformers; arguments of `generate` take
    precedence, and settings that are not supported are refused by name.

    Threads may share a generator, and streams may be interleaved: each run has its own cache, and its text does not
    depend on the others. On a GPU that holds up to rounding: kernels depend on the number of sequences and the length
    of the cache, and so may the choice between tokens that are about equally likely.

    plan: precision (fp32 unless it says bf16), weights (on a CPU: int8, int4), speculation, threads; a model that is
    run by its own forward pass keeps its precision unless it says bf16, and takes neither weights nor speculation.
    tokenizer: anything with `encode` and `decode`, where prompts or stops are texts. draft: a smaller model of the same
    vocabulary that guesses tokens ahead; what comes out is distributed as without it. slots: sequences worked on at
    once.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        draft: nn.Module | None = None,
        slots: int | None = None,
    ) -> None:
        self.plan = as_plan(plan, "generate")
        as_model(model)
        self.tokenizer = None if tokenizer is None else _OneAtATime(as_tokenizer(tokenizer))
        self._words = None if self.tokenizer is None else self.tokenizer.decode
        self._model, self._draft_model = model, draft
        self._slots = _count("slots", slots)
        self._preparing = threading.Lock()
        self._prepared = self._prepare(model, self.plan)
        self._draft: Prepared | None = None
        if draft is not None or self.plan.speculation is not None:
            _check_guesses(self._prepared, "the model")
        if draft is not None:
            as_model(draft, "draft")
            try:
                self._draft = self._prepare(draft, self.plan)
            except UsageError as error:  # it names a model, and there are two
                raise type(error)(f"the draft: {error.what}", limit=error.limit, remedy=error.remedy) from error
            _check_guesses(self._draft, "the draft")
            own, of_draft = self.engine.vocabulary, self._draft.engine.vocabulary
            if own != of_draft:
                what = f"the draft's vocabulary has {of_draft} tokens"
                limit = f"the model's has {own}, and a guess must mean the same to both"
                raise UsageError(what, limit=limit, remedy="use a draft of the same tokenizer")

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Raises UsageError: the prepared weights follow this very model, and kernels hold their addresses."""
        raise UsageError(
            "a TokenGenerator cannot be copied or pickled",
            limit="it follows its own model, in this process",
            remedy="copy or pickle the model, and make another of it: flatout.TokenGenerator(model, plan)",
        )

    @property
    def engine(self) -> Engine:
        """What runs the passes."""
        return self._prepared.engine

    @property
    def engine_reason(self) -> str:
        """What that is in words, and why if it is not the fastest there is."""
        return self._prepared.reason

    @property
    def decoder(self) -> Decoder:
        """The model's sizes and weights. UsageError for a model that is run by its own forward pass."""
        found = self._prepared.decoder
        if found is None:
            limit = f"its weights are not read: it is run by {self.engine_reason}"
            raise UsageError(f"the {type(self._model).__name__} has no decoder here", limit=limit)
        return found

    def generate(
        self,
        prompts: object,
        *,
        max_new_tokens: int | None = None,
        attention_mask: object = None,
        stop: object = None,
        ignore_end: bool = False,
        decoder_start_token_id: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        pieces: Callable[[Piece], None] | None = None,
        **settings: object,
    ) -> Generation:
        """New tokens for every prompt, in the order of the prompts.

        prompts: texts, lists of ids, tensors, what a tokenizer returns, padded or not; see `read_prompts`.
        attention_mask: 1 = text, 0 = padding, which is never read. max_new_tokens: None = as the model's
        generation_config says, else 64. stop: a token id, a text, or a list of ids, texts and lists of ids; none of it
        is part of the result, nor is the model's end token, which stops a text unless `ignore_end`. progress: called
        with (texts ended, tokens made); pieces: with each piece as it comes.

        Of an encoder-decoder the prompts are the sources, and the texts begin after `decoder_start_token_id` (None = as
        the model's generation_config says), with which penalties and lengths count.

        settings: the fields of Sampling (temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram, seed)
        and of TokenRules (min_new_tokens, suppress_tokens, bad_words_ids ...); without a temperature: greedy, unless
        the model's generation_config says do_sample. A prompt's text depends on the seed and its number, not on the
        others generated with it; only with a draft and a temperature does it depend on when guesses were tried, which
        time decides.

        UsageError: a prompt or setting that cannot be used. NumericsError: logits that are NaN, +inf or all -inf.
        """
        run = self._run(prompts, max_new_tokens, attention_mask, stop, ignore_end, decoder_start_token_id, settings)
        ended = made = 0
        strings = ["" for _ in run.texts]
        for piece in run.pieces():
            ended += piece.reason is not None
            made += len(piece.tokens)
            strings[piece.prompt] += piece.text or ""
            if progress is not None:
                progress(ended, made)
            if pieces is not None:
                pieces(piece)
        return run.generation(strings if self.tokenizer is not None else None)

    def stream(
        self,
        prompts: object,
        *,
        max_new_tokens: int | None = None,
        attention_mask: object = None,
        stop: object = None,
        ignore_end: bool = False,
        decoder_start_token_id: int | None = None,
        **settings: object,
    ) -> Iterator[Piece]:
        """The same as pieces, as they come; those of several prompts take turns."""
        run = self._run(prompts, max_new_tokens, attention_mask, stop, ignore_end, decoder_start_token_id, settings)
        return run.pieces()

    # inside

    def _run(
        self,
        prompts: object,
        max_new_tokens: int | None,
        attention_mask: object,
        stop: object,
        ignore_end: bool,
        decoder_start_token_id: int | None,
        settings: dict[str, object],
    ) -> _Run:
        max_new_tokens = _count("max_new_tokens", max_new_tokens)
        settings = {name: plain_number(value) for name, value in settings.items()}
        prepared, draft = self._current()
        engine = prepared.engine
        vocabulary, max_tokens, encodes = engine.vocabulary, engine.max_tokens, engine.encodes
        given = {**settings, "max_new_tokens": max_new_tokens, "stop": stop}
        own = read_settings(self._model, given, encodes=encodes)
        pad = own.pad_token if own.pad_token is not None else getattr(self.tokenizer, "pad_token_id", None)
        ids = read_prompts(
            prompts,
            tokenizer=self.tokenizer,
            vocabulary=vocabulary,
            max_tokens=max_tokens,
            attention_mask=attention_mask,
            pad_token=pad,
            end_tokens=own.end_tokens,
        )
        first = _start_token(plain_number(decoder_start_token_id), own, vocabulary, encodes)
        ends = [] if ignore_end else [one for one in own.end_tokens if 0 <= one < vocabulary]
        choice = _choice(settings, own, ends, vocabulary)
        stops = stops_from(list(own.stop_strings) if stop is None else stop, ends, self._words, vocabulary=vocabulary)
        seed = None if choice.sampling.greedy else choice.sampling.seed
        seed = fresh_seed() if seed is None and not choice.sampling.greedy else seed
        texts = []
        for index, one in enumerate(ids):
            prompt = one if first is None else [first]
            wanted = _wanted(prompt, max_new_tokens, own)
            # The last token is not read: it may be one more than the model reads.
            room = wanted if max_tokens is None else max_tokens - len(prompt) + 1
            limit = min(wanted, room, _ENDLESS)
            before = prompt if first is None else ()  # what a decoder begins with is no text that goes on
            text = Text(
                index=index,
                prompt=prompt,
                source=None if first is None else one,
                limit=limit,
                at_limit="context" if limit == room < wanted else "length",
                watch=Watch(stops, limit=limit, before=before),
                uniforms=None if seed is None else Uniforms(seed, index, limit),
            )
            texts.append(text)
        slots = min(self._slots or DEFAULT_SLOTS[engine.device.type], len(texts))
        guesses = self.plan.speculation is not None
        return _Run(prepared, draft, choice, texts, seed, own, slots, guesses)

    def _prepare(self, model: nn.Module, plan: Plan) -> Prepared:
        return Prepared(model, plan)

    def _current(self) -> tuple[Prepared, Prepared | None]:
        """The prepared model and draft, prepared again if they have changed."""
        with self._preparing:
            if self._prepared.seen.changed(self._model):
                self._prepared = self._prepare(self._model, self.plan)
            draft, model = self._draft, self._draft_model
            if draft is not None and model is not None and draft.seen.changed(model):
                self._draft = self._prepare(model, self.plan)
            return self._prepared, self._draft


@dataclass
class _Run:
    """One checked call, with its own caches from the first piece to the last."""

    prepared: Prepared
    draft: Prepared | None
    choice: Choice
    texts: list[Text]
    seed: int | None
    settings: ModelSettings
    slots: int
    guesses: bool
    """Whether to guess ahead without a draft."""
    batches: BatchRun | None = None
    note: str = ""

    def pieces(self) -> Iterator[Piece]:
        # Of the longest text (of an encoder-decoder, of its target) without its last token, which nothing reads.
        length = max(len(text.prompt) + text.limit - 1 for text in self.texts)
        sources = [one for one in (self.prepared, self.draft) if one is not None]
        leased = [one.lease(length, self.slots) for one in sources]
        draft = leased[1] if len(leased) > 1 else None
        assert draft is None or isinstance(draft, CachedPasses), "another draft was refused"
        guesser = Guesser(self.choice, draft) if draft is not None or self.guesses else None
        try:
            self.batches = BatchRun(leased[0], self.choice, self.texts, guesser, self._check)
            yield from self.batches.pieces()
        finally:  # at the end, and where a stream is left in its middle
            self.note = leased[0].note
            for one, passes in zip(sources, leased, strict=True):
                one.give_back(passes)

    def generation(self, strings: list[str] | None) -> Generation:
        """Everything, once the last piece has come."""
        run, texts, engine = self.batches, self.texts, self.prepared.engine
        assert run is not None, "pieces were read"
        ceilings, guesser = known_ceilings(engine.device), run.guesser
        return Generation(
            tokens=[text.made[: text.watch.certain_tokens] for text in texts],
            texts=strings,
            reasons=[text.reason for text in texts if text.reason is not None],
            seed=self.seed,
            prompt_tokens=sum(len(text.source or text.prompt) for text in texts),
            generated_tokens=sum(len(text.made) for text in texts),
            prefill_seconds=run.reading.seconds,
            decode_seconds=run.writing.seconds,
            prefill_share=run.reading.share(ceilings),
            decode_share=run.writing.share(ceilings),
            storage=engine.storage,
            engine="; ".join(part for part in (self.prepared.reason, self.note) if part),
            model_settings=self.settings.taken,
            speculation=None
            if guesser is None
            else Speculation(proposed=guesser.proposed, accepted=guesser.accepted, passes=run.passes),
        )

    def _check(self) -> None:
        """Between passes: a text must not come half from the old weights and half from the new."""
        for one in (self.prepared, self.draft):
            if one is not None and one.seen.written():
                limit = "its first part is that of the old weights"
                remedy = "generate between training steps, or from a copy of the model (copy.deepcopy)"
                raise UsageError("the model's weights changed while a text was made", limit=limit, remedy=remedy)


def generate(
    model: nn.Module,
    prompts: object,
    *,
    max_new_tokens: int | None = None,
    attention_mask: object = None,
    plan: Plan | None = None,
    stop: object = None,
    tokenizer: Tokenizer | None = None,
    draft: nn.Module | None = None,
    ignore_end: bool = False,
    decoder_start_token_id: int | None = None,
    **settings: Any,  # may hold progress and pieces of TokenGenerator.generate
) -> Generation:
    """New tokens for every prompt: see TokenGenerator and its `generate`.

    The prepared weights are kept as long as the model lives, so that the next call with the same plan starts at once.
    They take as much memory as the weights in that form: to control when they are freed, use a TokenGenerator.
    """
    return _OfKept(model, plan, tokenizer=tokenizer, draft=draft).generate(
        prompts,
        max_new_tokens=max_new_tokens,
        attention_mask=attention_mask,
        stop=stop,
        ignore_end=ignore_end,
        decoder_start_token_id=decoder_start_token_id,
        **settings,
    )


class _OfKept(TokenGenerator):
    """For one call, with what was kept of calls before."""

    def _prepare(self, model: nn.Module, plan: Plan) -> Prepared:
        return kept(model, plan)

    def _current(self) -> tuple[Prepared, Prepared | None]:
        return self._prepared, self._draft  # looked at a moment ago, when this was made


class _OneAtATime:
    """A tokenizer shared by threads: those of transformers fail when two threads encode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._lock = threading.Lock()
        self._encode, self._decode = encode_of(tokenizer), decode_of(tokenizer)
        self.pad_token_id: int | None = getattr(tokenizer, "pad_token_id", None)

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return self._encode(text)

    def decode(self, tokens: list[int]) -> str:
        with self._lock:
            return self._decode(tokens)


def _wanted(prompt: list[int], max_new_tokens: int | None, own: ModelSettings) -> int:
    """New tokens at most, by the caller, else by the model."""
    if max_new_tokens is not None:
        return max_new_tokens
    if own.max_new_tokens is not None:
        return as_whole_number(own.max_new_tokens, "the generation_config's max_new_tokens")
    if own.max_length is None:
        return MAX_NEW_TOKENS
    most = as_whole_number(own.max_length, "the generation_config's max_length")
    if most <= len(prompt):
        limit = f"the generation_config's max_length is {most}, prompt and new tokens together"
        raise UsageError(f"a prompt has {len(prompt)} tokens", limit=limit, remedy="pass max_new_tokens=...")
    return most - len(prompt)


def _count(name: str, value: object) -> int | None:
    return None if value is None else as_whole_number(plain_number(value), name)


def _choice(settings: dict[str, object], own: ModelSettings, ends: Sequence[int], vocabulary: int) -> Choice:
    """What the caller set, and else the model."""
    of_sampling = [one.name for one in fields(Sampling)]
    of_rules = [one.name for one in fields(TokenRules) if one.init]
    known = [*of_sampling, *of_rules]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = _ELSEWHERE.get(name) or (f"did you mean {close[0]}?" if close else "leave it out")
            what, limit = f"generating has no setting {name!r}", f"there are {', '.join(known)}"
            raise UsageError(what, limit=limit, remedy=remedy)
    _check_own(own, vocabulary)
    given = {name: value for name, value in settings.items() if value is not None}
    sampling = {**own.sampling, **{name: value for name, value in given.items() if name in of_sampling}}
    rules = {**own.rules, **{name: value for name, value in given.items() if name in of_rules}}
    choice = Choice(sampling=_SAMPLING(**sampling), rules=_RULES(**rules).with_ends(ends))
    choice.rules.check(vocabulary)
    return choice


def _check_own(own: ModelSettings, vocabulary: int) -> None:
    """UsageError that names the generation_config: the caller did not pass these."""
    try:
        _SAMPLING(**{"temperature": 1.0, **own.sampling})  # the caller's temperature may be what it draws with
        _RULES(**own.rules).check(vocabulary)
    except UsageError as error:
        remedy = "change model.generation_config (generation_config.json), or pass another value"
        raise UsageError(f"the model's generation_config: {error.what}", limit=error.limit, remedy=remedy) from error


def _start_token(given: object, own: ModelSettings, vocabulary: int, encodes: bool) -> int | None:
    """What the texts of an encoder-decoder begin with; None for another model."""
    if not encodes:
        if given is not None:
            what = f"decoder_start_token_id is {given!r}"
            raise UsageError(what, limit="it is for encoder-decoders, and the model is none", remedy="leave it out")
        return None
    start = own.decoder_start_token if given is None else given
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < vocabulary:
        limit = f"an encoder-decoder's text begins with one of its tokens, 0 to {vocabulary - 1}"
        remedy = "pass decoder_start_token_id=..., the token that targets began with in training"
        raise UsageError(f"decoder_start_token_id is {start!r}", limit=limit, remedy=remedy)
    return start


def _check_guesses(prepared: Prepared, name: str) -> None:
    """PlanError for a model with which nothing can be guessed ahead."""
    if prepared.decoder is not None:
        return
    what = f"guessing ahead, and {name} is run by {prepared.reason}"
    limit = "a wrong guess is cut from a cache that is kept here"
    if prepared.engine.encodes:
        what = f"guessing ahead, and {name} is an encoder-decoder"
        limit = "guesses go on with the prompt itself, by a model that is a decoder alone"
    remedy = "use a draft that is a decoder alone, or leave it out" if name == "the draft" else ""
    raise PlanError(what, limit=limit, remedy=remedy or "leave out speculation and draft")
