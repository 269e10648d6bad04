"""Inference: BERT-Large over sentences of all lengths, and text from GPT-2 124M.

Weights are random, as speed does not depend on them, and the same in every process: one seed draws them, for
transformers' model where it is installed, from which flatout's own model takes them over.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flatout.bench.workload import Contender, Prepared, Settings, Setup, Untyped, Workload, peer_package
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.infer.prediction.predict import Predictor
from flatout.models import GPT2, Bert, BertConfig, GPT2Config
from flatout.plan import Plan

BATCH = 32
"""The guides' batch of sentences."""
MEAN_TOKENS, LONGEST, VOCABULARY = 27, 128, 30522
PROMPT_TOKENS = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# BERT-Large


def sentence_count(setup: Setup) -> int:
    """A GPU has several batches in a turn, so that waiting for its end does not count."""
    return 8 if setup.reduced else 8 * BATCH if setup.device == "cuda" else BATCH


def sentences(setup: Setup) -> list[Tensor]:
    """Random tokens, log-normal in length."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    drawn = (round(draw.lognormvariate(math.log(MEAN_TOKENS) - 0.18, 0.6)) for _ in range(sentence_count(setup)))
    lengths = [min(LONGEST, max(4, length)) for length in drawn]
    return [torch.randint(999, VOCABULARY, (length,), generator=generator) for length in lengths]


def bert_plain(setup: Setup, settings: Settings) -> Prepared:
    """In fp32, batches padded to their longest sentence."""
    _, model = _berts()
    model = model.to(setup.device)

    def call(tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden: Tensor = model(tokens, valid=lengths).hidden
        return hidden

    return _in_padded_batches(call, setup, by_length=False, how="fp32")


def bert_by_transformers(setup: Setup, settings: Settings) -> Prepared:
    """The same with transformers' model, in the order given or sorted by length."""
    peer_package("transformers")
    theirs, _ = _berts()
    model = theirs.to(setup.device, DTYPES[str(settings["dtype"])])
    called = torch.compile(model, dynamic=True) if settings["compiled"] else model

    def call(tokens: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        hidden: Tensor = called(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return hidden

    words = [str(settings["dtype"]), "sorted by length" * bool(settings["sorted"])]
    how = ", ".join(filter(None, [*words, "compiled" * bool(settings["compiled"])]))
    return _in_padded_batches(call, setup, by_length=bool(settings["sorted"]), how=how)


def bert_by_flatout(setup: Setup, settings: Settings) -> Prepared:
    """`flatout.predict`, which packs sentences without padding."""
    _, model = _berts()
    predictor, given = Predictor(model, Plan(precision="bf16"), device=setup.device), sentences(setup)

    def run() -> list[Untyped]:
        return list(predictor(given))

    def outputs() -> Tensor:
        return torch.cat([one.hidden for one in run()]).float()

    def flops() -> float | None:
        predictions = predictor(given)
        predictions.collect()
        return predictions.figures.flops

    return Prepared(turn=_without_loss(run), how="bf16, packed", outputs=outputs, flops=flops)


def _transformers() -> Untyped:
    """Quiet; None: it is not installed. The seed is that of all weights."""
    torch.manual_seed(0)
    try:
        transformers = peer_package("transformers")
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    return transformers


def _berts() -> tuple[Untyped, Bert]:
    """transformers' BERT-Large (None: not installed), and flatout's own with the same weights."""
    transformers = _transformers()
    if transformers is None:
        return None, Bert(BertConfig.large(), pooler=False).eval()
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    theirs: Untyped = transformers.BertModel(transformers.BertConfig(**large), add_pooling_layer=False).eval()
    config = BertConfig.from_hugging_face(theirs.config.to_dict())
    return theirs, Bert.from_hugging_face(theirs.state_dict(), config, pooler=False).eval()


def _in_padded_batches(
    call: Callable[[Tensor, Tensor], Tensor], setup: Setup, *, by_length: bool, how: str
) -> Prepared:
    """call: (tokens [batch, longest], lengths [batch]) -> hidden [batch, longest, width]."""
    given = sentences(setup)
    places = list(range(len(given)))
    if by_length:
        places.sort(key=lambda place: len(given[place]))
    batches = [places[start : start + BATCH] for start in range(0, len(places), BATCH)]

    def run() -> list[Tensor]:
        found: dict[int, Tensor] = {}
        with torch.inference_mode():
            for batch in batches:
                tokens = torch.nn.utils.rnn.pad_sequence([given[place] for place in batch], batch_first=True)
                lengths = torch.tensor([len(given[place]) for place in batch])
                hidden = call(tokens.to(setup.device), lengths.to(setup.device))
                for row, place in enumerate(batch):
                    found[place] = hidden[row, : len(given[place])]
        _wait(setup)
        return [found[place] for place in range(len(given))]

    return Prepared(turn=_without_loss(run), how=how, outputs=lambda: torch.cat(run()).float().cpu())


def _encoder_grid(setup: Setup) -> Sequence[Settings]:
    if setup.quick:
        return ({"dtype": "bf16", "compiled": False, "sorted": True},)
    found = itertools.product((False, True), (False, True))
    return [{"dtype": "bf16", "compiled": compiled, "sorted": by_length} for compiled, by_length in found]


# GPT-2


def new_tokens(setup: Setup) -> int:
    return 16 if setup.reduced else 64


def text_without_cache(setup: Setup, settings: Settings) -> Prepared:
    """The loop of the guides: the whole text is run for each token, and the likeliest one appended."""
    _, model = _gpts()
    model = model.to(setup.device)
    prompt = _prompt(setup)

    def run() -> Tensor:
        text = prompt
        with torch.inference_mode():
            for _ in range(new_tokens(setup)):
                text = torch.cat([text, model(text)[:, -1, :].argmax(dim=-1, keepdim=True)], dim=1)
        _wait(setup)
        return text[0, PROMPT_TOKENS:]

    return Prepared(turn=_without_loss(run), how="fp32, no KV cache", outputs=lambda: run().cpu())


def text_by_transformers(setup: Setup, settings: Settings) -> Prepared:
    """`generate` of transformers; compiled with a cache of fixed size, as its documentation advises."""
    peer_package("transformers")
    theirs, _ = _gpts()
    model = theirs.to(setup.device, DTYPES[str(settings["dtype"])])
    asked: dict[str, object] = {"max_new_tokens": new_tokens(setup), "min_new_tokens": new_tokens(setup)}
    asked |= {"do_sample": False, "pad_token_id": 0, "use_cache": settings.get("cached", True)}
    if settings["compiled"]:
        model.forward = torch.compile(model.forward)
        asked["cache_implementation"] = "static"
    prompt = _prompt(setup)

    def run() -> Tensor:
        with torch.inference_mode():
            text: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
        _wait(setup)
        return text[0, PROMPT_TOKENS:]

    how = str(settings["dtype"]) + ", compiled" * bool(settings["compiled"])
    return Prepared(turn=_without_loss(run), how=how, outputs=lambda: run().cpu())


def text_by_flatout(plan: Plan, setup: Setup, settings: Settings) -> Prepared:
    _, model = _gpts()
    generator, prompt = TokenGenerator(model.to(setup.device), plan, slots=1), _prompt(setup)

    def run() -> Tensor:
        made = generator.generate(prompt, max_new_tokens=new_tokens(setup), ignore_end=True)
        _wait(setup)
        return torch.tensor(made.tokens[0])

    return Prepared(turn=_without_loss(run), how=f"{plan.weights or plan.precision} weights", outputs=run)


def _gpts() -> tuple[Untyped, GPT2]:
    """transformers' GPT-2 124M (None: not installed), and flatout's own with the same weights."""
    transformers = _transformers()
    if transformers is None:
        return None, GPT2(GPT2Config()).eval()
    theirs: Untyped = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    config = GPT2Config.from_hugging_face(theirs.config.to_dict())
    return theirs, GPT2.from_hugging_face(theirs.state_dict(), config).eval()


def _prompt(setup: Setup) -> Tensor:
    tokens = torch.randint(0, 50257, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens.to(setup.device)


def _text_grid(setup: Setup) -> Sequence[Settings]:
    if setup.quick:
        return ({"dtype": "bf16", "compiled": False},)
    found = itertools.product(DTYPES, (False, True))
    return [{"dtype": dtype, "compiled": compiled} for dtype, compiled in found]


def _without_loss(run: Callable[[], object]) -> Callable[[], None]:
    def turn() -> None:
        run()

    return turn


def _wait(setup: Setup) -> None:
    if setup.device == "cuda":
        torch.cuda.synchronize()


# workloads

INFERENCE = (
    Workload(
        key="bert-large-inference",
        title="BERT-Large inference",
        unit="sentences",
        guides="320 sentences/s on an RTX 4090 with batch 32 and torch.compile",
        size=lambda setup: f"{sentence_count(setup)} sentences of 4 to {LONGEST} tokens",
        items=sentence_count,
        contenders=(
            Contender(name="plain torch", role="plain", prepare=bert_plain),
            Contender(name="transformers", role="peer", prepare=bert_by_transformers, grid=_encoder_grid),
            Contender(name="flatout.predict", role="flatout", prepare=bert_by_flatout),
        ),
        compared="values",
        flops_of="flatout.predict",
    ),
    Workload(
        key="gpt2-generation",
        title="GPT-2 124M generation",
        unit="tokens",
        guides="145 tokens/s on an RTX 4090 with a KV cache",
        size=lambda setup: f"{new_tokens(setup)} tokens after a prompt of {PROMPT_TOKENS}",
        items=new_tokens,
        contenders=(
            Contender(name="plain torch", role="plain", prepare=text_without_cache),
            Contender(name="transformers", role="peer", prepare=text_by_transformers, grid=_text_grid),
            Contender(
                name="flatout.generate", role="flatout", prepare=partial(text_by_flatout, Plan(precision="bf16"))
            ),
            Contender(
                name="flatout.generate, int8",
                role="flatout",
                prepare=partial(text_by_flatout, Plan(weights="int8")),
                other_numbers="weights of 8 bits",
            ),
        ),
        compared="tokens",
    ),
)
