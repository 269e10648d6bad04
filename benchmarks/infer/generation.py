"""`python -m benchmarks.infer.generation`: text from a GPT-2 of 124M weights, beside transformers at its best settings.

Weights are random: speed does not depend on them. Contenders take turns in one process, in another order every round;
ratios are those of paired rounds (exact signed-rank interval, 95 %). The memory's read rate is measured in every round
beside them, and a share of the ceiling is against the best of that round's readings: on a shared machine the ceiling
moves. `--device cuda`: on a GPU, where generate has fp32 and bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.infer.surroundings import read_rate, surroundings, wait_for
from flatout.infer.generation.native_decoder import NativeDecoder
from flatout.infer.generation.self_check import check_against_model
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.infer.generation.torch_decoder import TorchDecoder
from flatout.models import GPT2, GPT2Config
from flatout.plan import Plan
from flatout.statistics import compare_paired, median

PROMPT, NEW = 32, 64
STORAGES: dict[str, Plan] = {
    "fp32": Plan(precision="fp32"),
    "bf16": Plan(precision="bf16"),
    "int8": Plan(weights="int8"),
    "int4": Plan(weights="int4"),
}
Run = Callable[[], float]
"""Generates once; seconds."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infer.generation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    theirs, ours = _models(arguments.device)
    results = [
        _preparing(ours, arguments.rounds),
        _beside_transformers(theirs, ours, 1, arguments.rounds),
        _beside_transformers(theirs, ours, 16, max(5, arguments.rounds // 2)),
        _reading_prompts(theirs, ours, max(5, arguments.rounds // 2)),
        _guessing(ours, arguments.rounds),
        _exactness(ours),
    ]
    if arguments.out:
        document: dict[str, Any] = {"benchmark": "generation", **surroundings("transformers"), "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _models(device: str) -> tuple[Any, Any]:
    """transformers' GPT-2 (None if it is not installed) and a model with the same weights, on this device."""
    torch.manual_seed(0)
    try:
        import transformers
    except ImportError:
        print("transformers: not installed")
        return None, GPT2().eval().to(device)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval().to(device)
    config = GPT2Config.from_hugging_face(theirs.config.to_dict())
    return theirs, GPT2.from_hugging_face(theirs.state_dict(), config).eval().to(device)


def _device(ours: Any) -> str:
    return str(next(ours.parameters()).device.type)


def _storages(ours: Any) -> dict[str, Plan]:
    """Fewer bits need kernels that a GPU does not have here."""
    return {name: plan for name, plan in STORAGES.items() if _device(ours) == "cpu" or plan.weights is None}


def _beside_transformers(theirs: Any, ours: Any, batch: int, rounds: int) -> dict[str, Any]:
    prompts = torch.randint(0, 50257, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts = prompts.to(_device(ours))
    generators = {name: TokenGenerator(ours, plan, slots=batch) for name, plan in _storages(ours).items()}
    contenders: dict[str, Run] = {}
    if theirs is not None:
        contenders |= _transformers(theirs, prompts)
    decoding: dict[str, list[float]] = {name: [] for name in generators}
    for name, generator in generators.items():

        def run(name: str = name, generator: TokenGenerator = generator) -> float:
            wait_for(_device(ours))
            began = time.perf_counter()
            made = generator.generate(prompts, max_new_tokens=NEW, ignore_end=True)
            wait_for(_device(ours))
            decoding[name].append(made.decode_seconds)
            return time.perf_counter() - began

        contenders[f"flatout {name}"] = run
    seconds, rates = _in_turns(contenders, rounds, _device(ours))
    print(f"batch {batch}: {PROMPT} tokens read, {NEW} generated ({rounds} rounds)")
    rows = {}
    for name, found in seconds.items():
        row: dict[str, Any] = {"seconds": found, "tokens_per_second": batch * NEW / median(found)}
        text = f"  {name:28} {row['tokens_per_second']:8.0f} tokens/s"
        for peer in ("transformers fp32", "transformers bf16"):
            if peer in seconds and name != peer:
                ratio = compare_paired(seconds[peer], found)
                row[f"against {peer}"] = asdict(ratio)
                text += f"   x{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) {peer.removeprefix('transformers ')}"
        if name.startswith("flatout "):
            storage = name.removeprefix("flatout ")
            shares = _shares(generators[storage], batch, decoding[storage][1:], rates[name])
            row["decoding"] = shares
            text += f"   decoding at {shares['median']:.0%} of the read rate, best {shares['best']:.0%}"
        rows[name] = row
        print(text, flush=True)
    return {"batch": batch, "prompt_tokens": PROMPT, "new_tokens": NEW, "rows": rows, "read_bytes_per_second": rates}


def _shares(generator: TokenGenerator, batch: int, seconds: list[float], rates: list[float]) -> dict[str, Any]:
    """Bytes that one token after the other had to read, over what the memory gave in that time, round by round."""
    engine, decoder = generator.engine, generator.decoder
    assert isinstance(engine, NativeDecoder | TorchDecoder), "whose weights are read"
    per_place = decoder.cache_bytes_per_token(4 if engine.storage == "fp32" else 2)
    # The first token comes out of reading the prompt; each later one reads the weights and what is kept so far.
    read = engine.weight_bytes * (NEW - 1) + batch * per_place * sum(range(PROMPT + 1, PROMPT + NEW))
    shares = [read / one / rate for one, rate in zip(seconds, rates, strict=True)]
    return {"bytes": read, "seconds": seconds, "median": median(shares), "best": max(shares), "rounds": shares}


def _transformers(model: Any, prompts: torch.Tensor) -> dict[str, Run]:
    """In fp32 and in bf16, and in bf16 with a cache of fixed size and a compiled forward pass."""
    import copy

    runs: dict[str, Run] = {}
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompts)
    halved = copy.deepcopy(model).bfloat16()
    compiled = copy.deepcopy(halved)
    compiled.forward = torch.compile(compiled.forward)
    static = {**settings, "cache_implementation": "static"}
    variants = {
        "transformers fp32": (model, settings),
        "transformers bf16": (halved, settings),
        "transformers bf16 compiled": (compiled, static),
    }
    for name, (one, chosen) in variants.items():

        def run(one: Any = one, chosen: Any = chosen) -> float:
            with torch.no_grad():
                return _timed(lambda: one.generate(prompts, attention_mask=mask, **chosen))

        try:
            run()
            runs[name] = run
        except Exception as error:  # a peer that fails is told, and the others go on
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    return runs


def _in_turns(
    contenders: dict[str, Run], rounds: int, device: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each contender, and the best read rate before and after each of its runs."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name in random.sample(list(contenders), len(contenders)):
            gc.collect()
            before = read_rate(device)
            took = contenders[name]()
            if turn:  # the first round warms up
                seconds[name].append(took)
                rates[name].append(max(before, read_rate(device)))
    return seconds, rates


def _preparing(ours: Any, rounds: int) -> dict[str, Any]:
    """From a model to a generator: its weights packed, and checked against the model. Wall and CPU seconds."""
    rows: dict[str, dict[str, list[float]]] = {}
    for name, plan in _storages(ours).items():
        rows[name] = {"seconds": [], "cpu_seconds": [], "of_which_check_seconds": [], "looking_for_changes_seconds": []}
        for turn in range(rounds + 1):
            gc.collect()
            cpu = time.process_time()
            seconds = _timed(lambda plan=plan: TokenGenerator(ours, plan))
            cpu = time.process_time() - cpu
            generator = TokenGenerator(ours, plan)
            check = _timed(lambda one=generator: check_against_model(ours, one.engine))
            looking = _timed(lambda one=generator: one._prepared.seen.changed(ours))
            if turn:  # the first round warms up
                for kind, value in zip(rows[name], (seconds, cpu, check, looking), strict=True):
                    rows[name][kind].append(value)
        text = ", ".join(
            f"{kind.removesuffix('_seconds')} {median(one) * 1e3:.0f} ms" for kind, one in rows[name].items()
        )
        print(f"  preparing {name:5} {text}", flush=True)
    return {"preparing": rows}


def _reading_prompts(theirs: Any, ours: Any, rounds: int) -> dict[str, Any]:
    """Time to the first token of a prompt of 512 tokens."""
    prompts = torch.randint(0, 50257, (1, 512), generator=torch.Generator().manual_seed(2))
    prompts = prompts.to(_device(ours))
    contenders: dict[str, Run] = {}
    if theirs is not None:
        halved = __import__("copy").deepcopy(theirs).bfloat16()
        for name, model in (("transformers fp32", theirs), ("transformers bf16", halved)):
            contenders[name] = lambda model=model: _first_token(model, prompts)
    for name, plan in _storages(ours).items():
        generator = TokenGenerator(ours, plan)
        contenders[f"flatout {name}"] = lambda generator=generator: _timed(
            lambda: generator.generate(prompts, max_new_tokens=1)
        )
    seconds, _ = _in_turns(contenders, rounds, _device(ours))
    print(f"first token after 512 ({rounds} rounds)")
    flops = 2 * 512 * 123.5e6
    for name, found in seconds.items():
        print(f"  {name:28} {median(found) * 1e3:8.0f} ms   {flops / median(found) / 1e9:6.0f} GFLOP/s", flush=True)
    return {"prompt_tokens": 512, "seconds": seconds}


def _first_token(model: Any, prompts: torch.Tensor) -> float:
    with torch.no_grad():
        return _timed(lambda: model(prompts, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1))


def _guessing(ours: Any, rounds: int) -> dict[str, Any]:
    """Prompt lookup on text that repeats (greedy: such a model falls into loops) and on text that is chance alone."""
    prompt = torch.randint(0, 50257, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    plain = TokenGenerator(ours, Plan(precision="bf16"))
    guessing = TokenGenerator(ours, Plan(precision="bf16", speculation="lookup"))
    results: dict[str, Any] = {}
    kinds: dict[str, dict[str, Any]] = {"repetitive": {}, "random": {"temperature": 1.0, "seed": 5}}
    for kind, settings in kinds.items():
        made: dict[str, Any] = {}

        def run(name: str, generator: TokenGenerator, settings: Any = settings, made: Any = made) -> float:
            return _timed(
                lambda: made.__setitem__(
                    name, generator.generate([prompt * 2], max_new_tokens=256, ignore_end=True, **settings)
                )
            )

        contenders: dict[str, Run] = {
            "plain": lambda run=run: run("plain", plain),
            "lookup": lambda run=run: run("lookup", guessing),
        }
        seconds, _ = _in_turns(contenders, rounds, _device(ours))
        ratio = compare_paired(seconds["plain"], seconds["lookup"])
        spoken = made["lookup"].speculation
        same = made["plain"].tokens == made["lookup"].tokens
        distinct = len(set(made["plain"].tokens[0]))
        print(
            f"lookup on {kind} text: x{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f}), {spoken.proposed} guessed, "
            f"{spoken.accepted} right; {'the same text' if same else 'ANOTHER TEXT'}; {distinct} different of 256",
            flush=True,
        )
        results[kind] = {
            "seconds": seconds,
            "against_plain": asdict(ratio),
            "speculation": asdict(spoken),
            "same_text": same,
            "distinct_tokens": distinct,
        }
    return {"guessing": results}


def _exactness(ours: Any) -> dict[str, Any]:
    """What fewer bits do to the logits of this model, whose weights are random."""
    from flatout.infer.generation.cache import Span

    tokens = torch.randint(0, 50257, (128,), generator=torch.Generator().manual_seed(4))
    found = {}
    for name, plan in _storages(ours).items():
        generator = TokenGenerator(ours, plan)
        passes = generator._prepared.lease(128, 1)
        found[name] = passes.advance(tokens.to(_device(ours)), [Span(slot=0, start=0, length=128)], every=True).double()
    rows = {}
    for name, logits in found.items():
        exact = found["fp32"]
        error = float((logits - exact).std() / exact.std())
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
        )
        rows[name] = {
            "relative_error": error,
            "same_first_choice": float((logits.argmax(-1) == exact.argmax(-1)).double().mean()),
            "mean_divergence_nats": float(divergence.sum(-1).mean()),
        }
        nats = rows[name]["mean_divergence_nats"]
        print(f"  {name:6} logits off by {error:.2%} of their spread, divergence {nats:.1e} nats")
    return {"exactness": rows}


def _timed(function: Callable[[], Any]) -> float:
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    wait_for(device)
    began = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
