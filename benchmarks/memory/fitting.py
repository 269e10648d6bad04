"""`python -m benchmarks.memory.fitting`: do `largest_batch` and `fit_to_memory` find what trying all finds?

largest  ten cases under an artificial limit. The exhaustive answer: sizes run for real, one by one from below, until
         one passes the limit. Then 200 steps of the answer with the longest inputs, under the same limit.
into     five small cases with a budget of 60 % of the plain peak. Every combination of measures runs for real: its
         peak, and its time by turns with the others that fit (after one round that sorts out the slow ones). The choice
         against the fastest of those.

One thread, and nothing else on the machine, if times are to mean anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatout
from flatout import Plan, TrainStep, largest_batch
from flatout.data.nested import repeat_batch
from flatout.machine.detect import detect
from flatout.memory.real_run import LimitedRun
from flatout.models import (
    GPT2,
    MLP,
    BertConfig,
    BertMaskedLM,
    ConvNet,
    ConvNetConfig,
    GPT2Config,
    MLPConfig,
    RecurrentClassifier,
    RecurrentClassifierConfig,
    ResNet,
    ResNetConfig,
    TransformerConfig,
    TransformerLM,
)
from flatout.sizing.fit_to_memory import fit_to_memory
from flatout.sizing.measures import contradict, measures_of
from flatout.sizing.target import find_target
from flatout.sizing.training import Training
from flatout.statistics import median
from flatout.train.loss import LanguageModelLoss

STEPS_AFTERWARDS = 200
BUDGET_SHARE = 0.6
ROUNDS = 5
MOST_FINAL = 6
FINAL_ROUNDS = 15
"""The fastest of many is one whose rounds were lucky: the first few, and the choice, are timed once more."""
SCREEN = 1.6
"""One quick round sorts out what is slower by more than this; the others are timed by turns."""

Case = Callable[[], tuple[nn.Module, Any, Any, Any]]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.fitting", description=__doc__)
    parser.add_argument("--only", choices=("largest", "into"))
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)

    def wanted(name: str) -> bool:
        return arguments.case is None or arguments.case in name

    found: dict[str, Any] = {"schema": "flatout-memory-fitting-1", "machine": detect().to_json()}
    if arguments.only != "into":
        found["largest"] = [_largest(name, case, limit) for name, (case, limit) in LARGEST.items() if wanted(name)]
    if arguments.only != "largest":
        found["into"] = [_into(name, case) for name, case in INTO.items() if wanted(name)]
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    good = all(row["equal"] and row["tries"] <= 5 and row["failures"] == 0 for row in found.get("largest", []))
    good = good and all(row["of_best"] <= 1.05 for row in found.get("into", []))
    return 0 if good else 1


# largest_batch


def _largest(name: str, case: Case, limit: int) -> dict[str, Any]:
    began = time.perf_counter()
    model, optimizer, loss_fn, batch = case()
    answer = largest_batch(TrainStep(model, optimizer, loss_fn), batch, limit=limit, progress=lambda line: None)
    seconds = time.perf_counter() - began
    exhaustive = 0
    for size in itertools.count(1):
        if _peak(case, Plan(), size, limit) is None:
            break
        exhaustive = size
    failures = _failures_afterwards(case, answer.batch_size, limit)
    row = {
        "name": name,
        "limit_bytes": limit,
        "batch_size": answer.batch_size,
        "exhaustive": exhaustive,
        "equal": exhaustive == answer.batch_size,
        "tries": len(answer.tries),
        "forecasts": len(answer.forecasts),
        "seconds": seconds,
        "failures": failures,
    }
    print(
        f"{name:22} {limit / 2**20:6.1f} MiB  batch {answer.batch_size:5}  exhaustive {exhaustive:5}  "
        f"{len(answer.tries)} tries, {len(answer.forecasts)} forecasts, {seconds:.1f} s  {failures} failures in "
        f"{STEPS_AFTERWARDS} steps",
        flush=True,
    )
    return row


def _peak(case: Case, plan: Plan, size: int | None, limit: int) -> int | None:
    """Bytes of real steps; None where they pass the limit."""
    model, optimizer, loss_fn, batch = case()
    run = LimitedRun("cpu", limit)
    try:
        with run:
            run.hold([*model.parameters(), *model.buffers()])
            batch = batch if size is None else repeat_batch(batch, size)
            run.hold(batch)
            step = TrainStep(model, optimizer, loss_fn, plan.with_choice("out_of_memory", "raise", ""))
            for _ in range(2):
                step(batch)
    except torch.OutOfMemoryError:
        return None
    return run.peak_bytes


def _failures_afterwards(case: Case, size: int, limit: int) -> int:
    model, optimizer, loss_fn, batch = case()
    failures = 0
    with LimitedRun("cpu", limit) as run:
        run.hold([*model.parameters(), *model.buffers()])
        batch = repeat_batch(batch, size)
        step = TrainStep(model, optimizer, loss_fn, Plan(out_of_memory="raise"))
        for _ in range(STEPS_AFTERWARDS):
            try:
                step(batch)
            except torch.OutOfMemoryError:
                failures += 1
    return failures


# fit_to_memory


def _into(name: str, case: Case) -> dict[str, Any]:
    model, optimizer, loss_fn, batch = case()
    plain = _peak(case, Plan(), None, 1 << 50)
    assert plain is not None
    budget = int(BUDGET_SHARE * plain)
    began = time.perf_counter()
    step = TrainStep(model, optimizer, loss_fn)
    answer = fit_to_memory(budget, step, batch, progress=lambda line: None)
    seconds = time.perf_counter() - began
    kinds = measures_of(Training.of(step, batch), find_target(None, model), len(batch[0]), "reduced")
    fitting = []
    for parts in itertools.product(*([{}, *kind] for kind in kinds)):
        choices = {key: value for part in parts for key, value in part.items()}
        if not contradict(choices, Plan()) and _fits(case, choices, budget):
            fitting.append(choices)
    chosen = answer.plan.choices()
    screened = _by_turns(case, fitting, rounds=1, steps=1)
    near = [index for index, took in enumerate(screened) if took <= SCREEN * min(screened) or fitting[index] == chosen]
    fitting_near = [fitting[index] for index in near]
    times = _by_turns(case, fitting_near, rounds=ROUNDS, steps=3)
    ranked = sorted(zip(times, fitting_near, strict=True), key=lambda pair: pair[0])
    fitting_near = [one for place, (_, one) in enumerate(ranked) if place < MOST_FINAL or one == chosen]
    times = _by_turns(case, fitting_near, rounds=FINAL_ROUNDS, steps=3)
    best = min(times)
    own = next((took for choices, took in zip(fitting_near, times, strict=True) if choices == chosen), None)
    row = {
        "name": name,
        "budget_bytes": budget,
        "plain_bytes": plain,
        "chosen": chosen,
        "best": fitting_near[times.index(best)],
        "combinations_that_fit": len(fitting),
        "of_which_with_8bit_moments": sum("optimizer_state" in one for one in fitting),
        "considered": [
            {"choices": one.choices, "predicted": one.predicted_ratio, "seconds": one.step_seconds}
            for one in answer.considered
            if one.step_seconds is not None
        ],
        "of_best": own / best if own is not None else float("inf"),
        "seconds": seconds,
    }
    print(
        f"{name:22} budget {budget / 2**20:6.1f} of {plain / 2**20:6.1f} MiB  chosen {chosen}  best {row['best']}  "
        f"x{row['of_best']:.3f} of the best of {len(fitting)} that fit, {seconds:.1f} s",
        flush=True,
    )
    return row


def _plan(choices: dict[str, Any]) -> Plan:
    plan = Plan()
    for key, value in choices.items():
        plan = plan.with_choice(key, value, "")
    return plan


def _fits(case: Case, choices: dict[str, Any], budget: int) -> bool:
    peak = _peak(case, _plan(choices), None, 1 << 50)
    return peak is not None and peak <= budget


def _by_turns(case: Case, all_choices: list[dict[str, Any]], *, rounds: int, steps: int) -> list[float]:
    """Median seconds of a step of each combination, in interleaved rounds."""
    model, optimizer, loss_fn, batch = case()
    training = Training.of(TrainStep(model, optimizer, loss_fn), batch)
    taken: list[list[float]] = [[] for _ in all_choices]
    for _ in range(rounds):
        for index, choices in enumerate(all_choices):
            with training.under(_plan(choices)).on_same_memory() as own:
                step = own.make_step()
                step(batch)
                began = time.perf_counter()
                for _ in range(steps):
                    step(batch)
                taken[index].append((time.perf_counter() - began) / steps)
                step.close()
    return [median(one) for one in taken]


# cases


def _classes(model: nn.Module, optimizer: Any, shape: tuple[int, ...], samples: int = 8) -> Any:
    torch.manual_seed(0)
    batch = (torch.randn(samples, *shape), torch.randint(0, 10, (samples,)))
    return model, optimizer(model.parameters()), flatout.supervised(nn.CrossEntropyLoss()), batch


def _language(model: nn.Module, optimizer: Any, vocabulary: int, tokens: int, size: int = 8) -> Any:
    torch.manual_seed(0)
    text = torch.randint(0, vocabulary, (size, tokens + 1))
    return model, optimizer(model.parameters()), LanguageModelLoss(), (text[:, :-1], text[:, 1:])


def _gpt2(optimizer: Any = torch.optim.AdamW, vocabulary: int = 512, layers: int = 4) -> Any:
    config = GPT2Config(vocab_size=vocabulary, max_tokens=64, width=64, heads=4, layers=layers)
    return _language(GPT2(config), optimizer, vocabulary, 64)


def _transformer(optimizer: Any = torch.optim.AdamW) -> Any:
    config = TransformerConfig(vocab_size=300, max_tokens=48, width=64, heads=4, layers=3)
    return _language(TransformerLM(config), optimizer, 300, 48)


def _bert(optimizer: Any = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=400, width=64, heads=4, layers=4, max_tokens=48)
    model, tokens = BertMaskedLM(config), torch.randint(0, 400, (8, 48))
    return model, optimizer(model.parameters()), flatout.supervised(nn.CrossEntropyLoss()), (tokens, tokens)


def _recurrent() -> Any:
    torch.manual_seed(0)
    config = RecurrentClassifierConfig(vocab_size=200, classes=10, embedding_width=32, hidden_width=48)
    model, tokens = RecurrentClassifier(config), torch.randint(0, 200, (8, 30))
    loss = flatout.supervised(nn.CrossEntropyLoss())
    return model, torch.optim.AdamW(model.parameters()), loss, (tokens, torch.randint(0, 10, (8,)))


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _mlp() -> nn.Module:
    return MLP(MLPConfig(inputs=256, hidden=(256,) * 6, dropout=0.1))


def _convnet() -> nn.Module:
    return ConvNet(ConvNetConfig(channels=3, height=16, width=16))


def _resnet() -> nn.Module:
    return ResNet(ResNetConfig(classes=10, stages=(2, 2), width=16))


IMAGE = (3, 32, 32)
MIB = 1 << 20
LARGEST: dict[str, tuple[Case, int]] = {
    "mlp, AdamW": (lambda: _classes(_mlp(), torch.optim.AdamW, (256,)), 9 * MIB),
    "mlp, SGD": (lambda: _classes(_mlp(), _sgd, (256,)), 5 * MIB),
    "convnet, AdamW": (lambda: _classes(_convnet(), torch.optim.AdamW, (3, 16, 16)), 16 * MIB),
    "resnet, SGD": (lambda: _classes(_resnet(), _sgd, IMAGE), 24 * MIB),
    "resnet, AdamW": (lambda: _classes(_resnet(), torch.optim.AdamW, IMAGE), 16 * MIB),
    "gpt2, AdamW": (_gpt2, 48 * MIB),
    "gpt2, SGD": (lambda: _gpt2(_sgd), 32 * MIB),
    "transformer lm": (_transformer, 40 * MIB),
    "bert": (_bert, 40 * MIB),
    "lstm": (_recurrent, 12 * MIB),
}
INTO: dict[str, Case] = {
    "gpt2, 8 blocks": lambda: _gpt2(layers=8),
    "gpt2, large vocabulary": lambda: _gpt2(vocabulary=8192, layers=2),
    "bert": _bert,
    "resnet": lambda: _classes(_resnet(), torch.optim.AdamW, IMAGE),
    "mlp": lambda: _classes(_mlp(), torch.optim.AdamW, (256,), 512),
}

if __name__ == "__main__":
    sys.exit(main())
