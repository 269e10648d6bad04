"""`python -m benchmarks.infer.choosing`: the plan that tune_inference finds, beside every combination of its levers.

Three models of random weights: a GPT-2 (6 layers, width 512, 8,192 tokens) that goes on after 6 prompts, a BERT-like
encoder (4 layers, width 256) over 64 ragged sentences, a bottleneck ResNet (width 16) over 48 images of 64 x 64. First
tune_inference chooses; then every combination of the same levers is made, judged by the same bounds and timed in turns
with the plain model. torch.compile is combined with precision and bits only (it decides on batches itself). Last, the
chosen plan and the best of all combinations run in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.infer.surroundings import surroundings
from flatout import Plan, tune_inference
from flatout.infer.choosing.closeness import Tolerance
from flatout.infer.choosing.inference_search import Option, in_turns
from flatout.infer.choosing.tuned_generation import TunedGeneration
from flatout.infer.choosing.tuned_prediction import TunedPrediction
from flatout.machine.detect import detect
from flatout.models import GPT2, Bert, BertConfig, GPT2Config, ResNet, ResNetConfig

CASES = ("gpt2", "bert", "resnet")
NEW_TOKENS = 32
WINDOW_BUDGET_SECONDS = 20.0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infer.choosing", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds for tune_inference")
    parser.add_argument("--threads", type=int, help="of every plan; default: tune_inference tries them")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out of the combinations")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    base = Plan(threads=arguments.threads) if arguments.threads else Plan()
    found = _cases_in(arguments.out)
    for name in arguments.cases or CASES:
        model, sample = _case(name)
        found[name] = _compared(name, model, sample, base, arguments)
        if arguments.out:
            document = {"benchmark": "infer.choosing", **surroundings(), "threads": torch.get_num_threads()}
            arguments.out.write_text(json.dumps({**document, "cases": found}, indent=1) + "\n")
    return 0


def _cases_in(out: Path | None) -> dict[str, Any]:
    """Cases measured before, which stay in the file unless they are measured anew."""
    return json.loads(out.read_text())["cases"] if out is not None and out.exists() else {}


def _case(name: str) -> tuple[torch.nn.Module, list[Any]]:
    torch.manual_seed(0)
    if name == "gpt2":
        model: torch.nn.Module = GPT2(GPT2Config(vocab_size=8192, max_tokens=256, width=512, heads=8, layers=6))
        return model.eval(), [torch.randint(0, 8192, (n,)).tolist() for n in (5, 12, 20, 33, 47, 60)]
    if name == "bert":
        model = Bert(BertConfig(vocab_size=2000, width=256, heads=4, layers=4))
        lengths = torch.distributions.LogNormal(3.1, 0.6).sample((64,)).clamp(3, 48).long().tolist()
        return model.eval(), [torch.randint(0, 2000, (n,)) for n in lengths]
    return ResNet(ResNetConfig(classes=10, width=16)).eval(), list(torch.randn(48, 3, 64, 64))


def _compared(name: str, model: torch.nn.Module, sample: list[Any], base: Plan, arguments: Any) -> dict[str, Any]:
    print(f"{name}: choosing ...", file=sys.stderr, flush=True)
    chosen = tune_inference(model, sample, plan=base, seconds=arguments.budget, max_new_tokens=NEW_TOKENS)
    print(chosen.summary(), flush=True)
    subject: Any
    if name == "gpt2":
        options: dict[str, Any] = {"tokenizer": None, "max_new_tokens": NEW_TOKENS}
        subject = TunedGeneration(model, sample, budget_seconds=arguments.budget, base=base, **options)
    else:
        subject = TunedPrediction(model, sample, budget_seconds=arguments.budget, base=base)
    began = time.perf_counter()
    plans = _combinations(subject.options(detect()), base, compiled=not arguments.no_compile)
    plain = subject.make(base)
    plain.first()
    tried = []
    for number, plan in enumerate(plans, 1):
        row = _tried(subject, plain, plan)
        tried.append(row)
        print(f"  {number} of {len(plans)}: {row}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    good = [row for row in tried if row.get("ratio") is not None]
    best = max(good, key=lambda row: row["ratio"], default={"choices": base.choices(), "ratio": 1.0})
    last = None
    if best["choices"] != chosen.plan.choices():
        ours, theirs = (subject.make(plan) for plan in (Plan(**best["choices"]), chosen.plan))
        ours.first()
        theirs.first()
        last = in_turns(ours.run, theirs.run, seconds=60.0, final=True).comparison
    result = {
        "chosen": chosen.to_json(),
        "choosing_seconds": chosen.seconds,
        "combinations": tried,
        "combinations_seconds": seconds,
        "best": best,
        "chosen_over_best": None if last is None else last.to_json(),
    }
    print(_line(name, result), flush=True)
    return result


def _combinations(options: list[Option], base: Plan, *, compiled: bool) -> list[Plan]:
    """Every combination; an axis is the options that set the same first field."""
    axes: dict[str, list[Option | None]] = {}
    for option in options:
        first = next(iter(option.choices))
        if first not in base.choices():
            axes.setdefault(first, [None]).append(option)
    modes = axes.pop("compile", [None])
    products = [list(axes.values())]
    if compiled and len(modes) > 1:
        products.append([modes[1:], *(axis for field, axis in axes.items() if field in ("precision", "weights"))])
    found: dict[str, Plan] = {}
    for axis_list in products:
        for combination in itertools.product(*axis_list):
            plan = base
            for option in combination:
                plan = plan if option is None else option.on(plan)
            found[json.dumps(plan.choices(), sort_keys=True)] = plan
    return [plan for plan in found.values() if plan.choices() != base.choices()]


def _tried(subject: Any, plain: Any, plan: Plan) -> dict[str, Any]:
    row: dict[str, Any] = {"choices": plan.choices(), "ratio": None}
    try:
        runner = subject.make(plan)
        obstacle = runner.first()
        accuracy = runner.judge()
        reason = obstacle or Tolerance().why_not(accuracy)
        if reason:
            return {**row, "left_out": reason}
        comparison = in_turns(plain.run, runner.run, seconds=WINDOW_BUDGET_SECONDS).comparison
    except Exception as error:
        return {**row, "left_out": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**row, "ratio": comparison.ratio, "low": comparison.low, "high": comparison.high}


def _line(name: str, result: dict[str, Any]) -> str:
    chosen, best, last = result["chosen"], result["best"], result["chosen_over_best"]
    share = result["choosing_seconds"] / result["combinations_seconds"]
    beside = "the same plan"
    if last is not None:
        beside = f"x{last['ratio']:.2f} ({last['low']:.2f} to {last['high']:.2f}) of the best, {best['choices']}"
    return (
        f"{name}: chosen {chosen['plan']} (x{chosen['speedup'] or 1:.2f}) in {result['choosing_seconds']:.0f} s; "
        f"{len(result['combinations'])} combinations in {result['combinations_seconds']:.0f} s ({share:.0%}): {beside}"
    )


if __name__ == "__main__":
    sys.exit(main())
