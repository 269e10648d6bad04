"""Generation as a subject for tuning: one run generates a fixed number of tokens for every prompt of the sample.

Accuracy is judged on the text that the fp32 model generates (greedy): every variant reads that same text, so that one
different token does not make the rest incomparable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatout.infer.choosing.closeness import Accuracy, Closeness
from flatout.infer.choosing.inference_search import Option, thread_options
from flatout.infer.generation.cache import CachedEngine
from flatout.infer.generation.generated import Generation
from flatout.infer.generation.prompts import read_prompts
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.infer.tokenizer_source import Tokenizer
from flatout.machine.description import Machine
from flatout.plan import Plan

MOST_PROMPTS = 64
"""Timed; as many slots as a GPU works on at once."""
LEAST_TOKENS = 16
LOGITS_BYTES = 256 << 20
"""Of the reference, which are kept to be compared with."""
RUNS = 80
"""Runs of the sample that should fit into the budget."""


class TunedGeneration:
    """A causal language model and prompts. Raises what TokenGenerator raises."""

    unit = "prompt"

    def __init__(
        self,
        model: nn.Module,
        prompts: object,
        *,
        tokenizer: Tokenizer | None,
        max_new_tokens: int,
        budget_seconds: float,
        base: Plan,
    ) -> None:
        self.model, self.base = model, base
        plain = TokenGenerator(model, base, tokenizer=tokenizer)
        decoder = plain.decoder
        given = read_prompts(prompts, tokenizer=tokenizer, vocabulary=decoder.vocabulary, max_tokens=decoder.max_tokens)
        self.prompts, self.tokens = _affordable(plain, given[:MOST_PROMPTS], max_new_tokens, budget_seconds)
        self.count = len(self.prompts)
        self.notes: list[str] = []
        if len(given) > self.count:
            self.notes.append(f"{self.count} of {len(given)} prompts were timed, to stay within the budget")
        if self.tokens < max_new_tokens:
            self.notes.append(
                f"{self.tokens} of {max_new_tokens} tokens a prompt were timed, to stay within the budget"
            )
        self.device = plain.engine.device
        self._texts = self._references(plain, max_new_tokens)

    @property
    def sample(self) -> str:
        """In words."""
        lengths = [len(prompt) for prompt in self.prompts]
        ragged = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else f"{lengths[0]}"
        return f"{self.count} prompts of {ragged} tokens, {self.tokens} new ones each, greedy"

    def make(self, plan: Plan) -> GeneratingRunner:
        return GeneratingRunner(TokenGenerator(self.model, plan), self)

    def options(self, machine: Machine) -> list[Option]:
        """First what changes no product, then fewer and fewer bits: each must beat the one before it."""
        on_cpu = self.device.type == "cpu"
        lookup = Option(label="lookup of guesses", choices={"speculation": "lookup"})
        bf16 = Option(label="bf16", choices={"precision": "bf16"})
        fewer = [
            Option(label=f"{bits} weights", choices={"weights": bits}, replaces=("precision",))
            for bits in (("int8", "int4") if on_cpu else ())  # CUDA has no kernels that read them
        ]
        return [*(thread_options(machine) if on_cpu else []), lookup, bf16, *fewer]

    def judge(self, generator: TokenGenerator) -> Accuracy:
        closeness = Closeness()
        for text, first, logits in self._texts:
            closeness.add("logits", logits, _logits(generator, text)[first:], scores=True)
        return closeness.found()

    def _references(self, plain: TokenGenerator, wanted: int) -> list[tuple[list[int], int, Tensor]]:
        """Texts with the first place that is judged, and the logits of fp32 from there on."""
        if self.base.precision in (None, "fp32") and self.base.weights is None:
            exact = plain
        else:
            exact = TokenGenerator(self.model, Plan(precision="fp32"))
        own = exact.generate(self.prompts, max_new_tokens=wanted, stop=[], temperature=0.0).tokens
        left = LOGITS_BYTES // (4 * exact.decoder.vocabulary)
        each = max(1, left // self.count)
        found = []
        for prompt, made in zip(self.prompts, own, strict=True):
            text = [*prompt, *made[: each - 1]]
            text = text[: exact.decoder.max_tokens]  # the last token may be beyond what it reads
            found.append((text, len(prompt) - 1, _logits(exact, text)[len(prompt) - 1 :]))
        return found


class GeneratingRunner:
    """TokenGenerator under one plan."""

    def __init__(self, generator: TokenGenerator, subject: TunedGeneration) -> None:
        self.generator, self._subject = generator, subject
        self.notes: Sequence[str] = (generator.engine_reason,)

    def first(self) -> str:
        self.run()
        return ""

    def share(self) -> str:
        made = self.run()
        return f"decoding {made.decode_share}, prompts {made.prefill_share}"

    def run(self) -> Generation:
        # Greedy and to the last token, whatever the text and the model's settings say: all ways do the same work.
        return self.generator.generate(
            self._subject.prompts, max_new_tokens=self._subject.tokens, ignore_end=True, stop=[], temperature=0.0
        )

    def judge(self) -> Accuracy:
        return self._subject.judge(self.generator)


def _logits(generator: TokenGenerator, text: list[int]) -> Tensor:
    """fp32 [tokens, vocabulary] on the CPU: what the engine says after every token of the text."""
    engine = generator.engine
    assert isinstance(engine, CachedEngine), "a generator with a decoder has one"
    return engine.logits(torch.tensor(text, device=engine.device)).cpu()


def _affordable(
    plain: TokenGenerator, prompts: list[list[int]], wanted: int, budget_seconds: float
) -> tuple[list[list[int]], int]:
    """Prompts and new tokens for each, so that the budget holds RUNS runs: first fewer tokens, then fewer prompts."""

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        plain.generate(prompts, max_new_tokens=tokens, ignore_end=True, stop=[], temperature=0.0)
        return time.perf_counter() - start

    seconds(1)
    reading, few = seconds(1), min(wanted, 5)
    each = max(1e-6, (seconds(few) - reading) / (few - 1)) if few > 1 else 1e-6
    wished = budget_seconds / RUNS
    tokens = min(wanted, max(LEAST_TOKENS, int((wished - reading) / each)))
    share = min(1.0, wished / (reading + (tokens - 1) * each))
    most = max(1, round(share * len(prompts)))
    return [prompts[place * len(prompts) // most] for place in range(most)], tokens
