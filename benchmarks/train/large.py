"""`python -m benchmarks.train.large`: a step of ResNet-50, GPT-2 124M and BERT-base, beside peers at their best.

Each contender has a process of its own, so that none profits from another's allocator or compiled code; they take
turns, a step each. A peer is tried in every setting of a published grid first (`peer_settings`), and the fastest takes
part. *flatout, tuned* runs the plan that `flatout.tune(step, batches)` finds in its process.

The share of the ceiling is the counted operations of the plain step over the contender's time and this machine's
fastest measured matrix product.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.infer.turns import versions
from flatout import TrainStep, tune
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.models import GPT2, BertConfig, BertMaskedLM, GPT2Config, ResNet, ResNetConfig
from flatout.statistics import compare_paired, median
from flatout.train.flops import count_step

TUNE_SECONDS = 600.0
WARM_STEPS = 3
TRIED_STEPS = 3
"""Of a peer in each of its settings, after as many to warm up."""
Step = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    images: bool = False


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))


def _text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 50257, (4, 257))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _masked() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 30522, (8, 128))
    return tokens, torch.where(torch.rand(8, 128) < 0.15, tokens, -100)


def _gpt() -> nn.Module:
    return GPT2(GPT2Config(max_tokens=256, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0))


def _bert() -> nn.Module:
    return BertMaskedLM(BertConfig.base(dropout=0.0, attention_dropout=0.0))


WORKLOADS = {
    "resnet": Workload(name="ResNet-50, batch 16", model=lambda: ResNet(ResNetConfig()), batch=_images, images=True),
    "gpt": Workload(name="GPT-2 124M, 4 x 256 tokens", model=_gpt, batch=_text),
    "bert": Workload(name="BERT-base, 8 x 128 tokens", model=_bert, batch=_masked),
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    scores = model(inputs)
    return nn.functional.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


# contenders: made in their own process; each returns a step, and what it is


def plain(workload: Workload) -> tuple[Step, str]:
    model = workload.model()
    return _loop(model, torch.optim.AdamW(model.parameters(), 1e-4), workload.batch()), "fp32"


def tuned(workload: Workload) -> tuple[Step, str]:
    model, batch = workload.model(), workload.batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    found = tune(TrainStep(model, optimizer, loss_of), [batch], seconds=TUNE_SECONDS, exactness="reduced")
    train = TrainStep(model, optimizer, loss_of, found.plan)
    chosen = ", ".join(f"{name} = {value}" for name, value in found.plan.choices().items()) or "nothing"
    return lambda: train(batch).item(), f"{chosen}; tuned in {found.seconds:.0f} s"


def by_hand(workload: Workload, *, compiled: bool, channels_last: bool) -> tuple[Step, str]:
    """Autocast to bf16 and the fused optimizer, written into the loop."""
    model, optimizer, batch = _at_its_best(workload, channels_last)
    cast = torch.autocast("cpu", torch.bfloat16)
    return _loop(torch.compile(model) if compiled else model, optimizer, batch, cast), _said(compiled, channels_last)


def fabric(workload: Workload, *, compiled: bool, channels_last: bool) -> tuple[Step, str]:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    raw, optimizer, batch = _at_its_best(workload, channels_last)
    model, wrapped = engine.setup(torch.compile(raw) if compiled else raw, optimizer)
    return _loop(model, wrapped, batch, backward=engine.backward), _said(compiled, channels_last)


def accelerate(workload: Workload, *, compiled: bool, channels_last: bool) -> tuple[Step, str]:
    from accelerate import Accelerator

    engine = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="inductor" if compiled else "no")
    raw, plain_optimizer, batch = _at_its_best(workload, channels_last)
    model, optimizer = engine.prepare(raw, plain_optimizer)
    return _loop(model, optimizer, batch, backward=engine.backward), _said(compiled, channels_last)


def _loop(
    model: Any,
    optimizer: Any,
    batch: Any,
    cast: AbstractContextManager[object] | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        with cast or contextlib.nullcontext():
            loss = loss_of(model, batch)
        backward(loss)
        optimizer.step()
        return float(loss.item())

    return step


def _at_its_best(workload: Workload, channels_last: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, (inputs, targets) = workload.model(), workload.batch()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True), (inputs, targets)


def _said(compiled: bool, channels_last: bool) -> str:
    return "bf16, fused AdamW" + ", channels_last" * channels_last + ", compiled" * compiled


CONTENDERS: dict[str, Callable[..., tuple[Step, str]]] = {
    "plain fp32": plain,
    "flatout, tuned": tuned,
    "autocast by hand": by_hand,
    "Fabric": fabric,
    "Accelerate": accelerate,
}
OURS = ("plain fp32", "flatout, tuned")


def peer_settings(workload: Workload) -> list[dict[str, bool]]:
    """The grid: compiled or not, and for images in either layout; bf16 and the fused optimizer always."""
    layouts = (False, True) if workload.images else (False,)
    return [{"compiled": one, "channels_last": other} for one, other in itertools.product((False, True), layouts)]


class Contender:
    """A process that takes a step when it is asked to."""

    def __init__(self, key: str, name: str, settings: dict[str, bool]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, key, name, settings), daemon=True)
        self._process.start()
        there.close()
        self.how = str(self._answer())

    def step(self) -> tuple[float, float]:
        """Seconds, loss."""
        self._here.send("step")
        seconds, loss = self._answer()
        return seconds, loss

    def flops(self) -> float:
        self._here.send("flops")
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        try:
            found = self._here.recv()
        except EOFError:
            raise RuntimeError("the process has ended") from None
        if isinstance(found, Exception):
            self.close()
            raise found
        return found


def _serve(pipe: Connection, key: str, name: str, settings: dict[str, bool]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            step, how = CONTENDERS[name](WORKLOADS[key], **settings)
            for _ in range(WARM_STEPS):
                step()
    except Exception as error:
        pipe.send(error if isinstance(error, ImportError) else RuntimeError(f"{type(error).__name__}: {error}"))
        return
    pipe.send(how)
    while True:
        if pipe.recv() == "flops":
            finish = count_step()
            step()
            pipe.send(finish())
            continue
        start = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - start, loss))


@contextlib.contextmanager
def started(key: str) -> Iterator[dict[str, Contender]]:
    """Every contender that is installed, peers in their fastest setting."""
    found: dict[str, Contender] = {}
    try:
        for name in CONTENDERS:
            grid = [{}] if name in OURS else peer_settings(WORKLOADS[key])
            best: tuple[float, dict[str, bool]] | None = None
            for settings in grid if len(grid) > 1 else []:
                try:
                    one = Contender(key, name, settings)
                except ImportError as error:
                    print(f"  {name}: not installed ({error})")
                    break
                except RuntimeError as error:
                    print(f"  {name} {settings}: {str(error).splitlines()[0]}")
                    continue
                seconds = min(one.step()[0] for _ in range(TRIED_STEPS))
                print(f"  {name}, {one.how}: {seconds:.3f} s", flush=True)
                best = min(best or (seconds, settings), (seconds, settings), key=lambda pair: pair[0])
                one.close()
            if len(grid) == 1 or best is not None:
                found[name] = Contender(key, name, best[1] if best else {})
        yield found
    finally:
        for one in found.values():
            one.close()


def measure(key: str, rounds: int, ceiling: Any) -> dict[str, Any]:
    workload = WORKLOADS[key]
    print(f"{workload.name}", flush=True)
    with started(key) as contenders:
        flops = contenders["plain fp32"].flops()
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        losses: dict[str, list[float]] = {name: [] for name in contenders}
        order = list(contenders)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                took, loss = contenders[name].step()
                seconds[name].append(took)
                losses[name].append(loss)
        how = {name: one.how for name, one in contenders.items()}
    print(f"  {flops / 1e9:,.0f} GFLOP a step, ceiling {ceiling[0]} {ceiling[1].value / 1e9:,.0f} GFLOP/s")
    peers = [name for name in seconds if name not in OURS]
    rows = {}
    for name, found in seconds.items():
        ratio = compare_paired(seconds["plain fp32"], found)
        share = flops / median(found) / ceiling[1].value
        rows[name] = {
            "how": how[name],
            "seconds": found,
            "losses": losses[name],
            "share_of_ceiling": share,
            "against_plain": asdict(ratio),
        }
        against = f"x{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        print(f"  {name:18} {median(found):7.3f} s  {against}  {share:.0%} of the ceiling  {how[name]}", flush=True)
    fastest = min(peers, key=lambda name: median(seconds[name]), default=None)
    against_peer = None
    if fastest is not None:
        ratio = compare_paired(seconds[fastest], seconds["flatout, tuned"])
        against_peer = {"peer": fastest, **asdict(ratio)}
        print(
            f"  flatout, tuned against {fastest}: x{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})", flush=True
        )
    return {"name": workload.name, "flops_per_step": flops, "rows": rows, "against_fastest_peer": against_peer}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.large", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=tuple(WORKLOADS))
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(words)
    machine = machine_with_ceilings(lambda text: None)
    ceiling = machine.ceilings.best_gemm() if machine.ceilings is not None else None
    if ceiling is None:
        raise SystemExit("no ceiling could be measured here")
    results = []
    for key in arguments.only or WORKLOADS:
        results.append(measure(key, arguments.rounds, ceiling))
        if arguments.out:
            document = {
                "benchmark": "train.large",
                "machine": machine.to_json(),
                "peers": versions("accelerate", "lightning"),
            }
            arguments.out.write_text(json.dumps({**document, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
