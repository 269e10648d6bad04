"""How claims about loading, devices, rates and other frameworks are measured; as in training_measures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.bench.claim import Case
from flatout.bench.claim_steps import (
    MODELS,
    RESNET_50,
    Step,
    amp_name,
    compared,
    models_of,
    training_step,
    wait_of,
)
from flatout.bench.inference import bert_by_transformers, new_tokens, sentence_count, text_by_transformers
from flatout.bench.process import ContenderProcess
from flatout.bench.results import Speedup
from flatout.bench.training import RESNET, Training, loss_of
from flatout.bench.workload import Prepare, Prepared, Settings, Setup, Untyped, peer_package
from flatout.models import MLP, MLPConfig
from flatout.timing import measure

STEPS_A_TURN = 20
"""So many that asking another process for them takes no time in comparison."""

# loading


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Samples that take a millisecond of Python and torch each, as small images do that are decoded."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        end = time.perf_counter() + 0.001
        image = torch.full((3, 32, 32), float(place))
        while time.perf_counter() < end:
            pass
        return image, place % 10


def loader_workers(setup: Setup, seconds: float) -> Sequence[Case]:
    table = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
    datasets: dict[str, Dataset[object]] = {
        "samples of 1 ms each (decoding)": _Decoded(),
        "tensors in memory": table,
    }
    return [
        Case(
            condition=f"two workers, {name}",
            measured=compared(_epoch(dataset, 0), _epoch(dataset, 2), setup, seconds),
            note="an epoch of loading alone",
        )
        for name, dataset in datasets.items()
    ]


def _epoch(dataset: Dataset[object], workers: int) -> Step:
    loader: DataLoader[object] = DataLoader(
        dataset, batch_size=64, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )

    def run() -> None:
        for _ in loader:
            pass

    return run


def pinned_copies(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for mebibytes in (1, 64):
        pageable = torch.empty(mebibytes << 18)
        pinned = pageable.pin_memory()

        def copy(source: Tensor) -> Step:
            return lambda: source.to("cuda", non_blocking=True)

        measured = compared(copy(pageable), copy(pinned), setup, seconds)
        cases.append(Case(condition=f"copies of {mebibytes} MiB to the GPU", measured=measured))
    return cases


def cudnn_benchmark(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for name in ("ConvNet on 32 x 32", RESNET_50):
        measured = in_two_processes(_training_turns, {"model": name}, "cudnn_benchmark", setup, seconds)
        cases.append(Case(condition=f"{name} training, fixed input size", measured=measured))
    return cases


def _training_turns(setup: Setup, settings: Settings) -> Prepared:
    torch.backends.cudnn.benchmark = bool(settings["cudnn_benchmark"])
    step, wait = training_step(MODELS[str(settings["model"])], setup, amp=True), wait_of(setup)

    def turn() -> None:
        for _ in range(STEPS_A_TURN):
            step()
        if wait is not None:
            wait()

    return Prepared(turn=turn, how="")


def in_two_processes(prepare: Prepare, settings: Settings, setting: str, setup: Setup, seconds: float) -> Speedup:
    """How many times as fast turns are with a setting that cannot be changed once work has begun: each side has a
    process of its own."""
    with contextlib.ExitStack() as stack:
        sides = [ContenderProcess(prepare, setup, {**settings, setting: wanted}) for wanted in (False, True)]
        for side in sides:
            stack.callback(side.close)
        for side in sides:
            side.wait_until_ready()
        return compared(sides[0].turn, sides[1].turn, setup, seconds)


# GPU against CPU


def gpu_against_cpu(setup: Setup, seconds: float) -> Sequence[Case]:
    return [_on_both(name, training, setup, seconds) for name, training in models_of(setup).items()]


def tiny_on_gpu(setup: Setup, seconds: float) -> Sequence[Case]:
    """How many times as fast the CPU is at a tiny model."""
    tiny = Training(
        model=lambda: MLP(MLPConfig(inputs=16, hidden=(32,))),
        batch=lambda setup: (torch.randn(16, 16), torch.randint(0, 10, (16,))),
    )
    on_gpu, on_cpu = training_step(tiny, setup), training_step(tiny, Setup(device="cpu", quick=setup.quick))
    return [Case(condition="MLP 16-32-10, batch 16", measured=compared(on_gpu, on_cpu, setup, seconds))]


def _on_both(name: str, training: Training, setup: Setup, seconds: float) -> Case:
    """The same batch on both."""
    inputs, targets = training.batch(setup)
    same = replace(training, batch=lambda setup: (inputs, targets))
    on_cpu, on_gpu = training_step(same, Setup(device="cpu", quick=setup.quick)), training_step(same, setup)
    return Case(condition=f"{name} training, fp32", measured=compared(on_cpu, on_gpu, setup, seconds))


# the table's rates, with the guides' settings


def resnet_rate(setup: Setup, seconds: float) -> Sequence[Case]:
    """Batch 64 with AMP."""
    count = 4 if setup.reduced else 64
    training = Training(
        model=RESNET.model, batch=lambda setup: (torch.randn(count, 3, 224, 224), torch.randint(0, 1000, (count,)))
    )
    step = training_step(training, setup, amp=True)
    return [_rate(f"batch {count}, AMP in {amp_name(setup)}", step, count, setup, seconds)]


def bert_rate(setup: Setup, seconds: float) -> Sequence[Case]:
    """Batch 32 with torch.compile; AMP is not mentioned."""
    prepared = bert_by_transformers(setup, {"dtype": "fp32", "compiled": True, "sorted": False})
    count = sentence_count(setup)
    return [_rate(f"{count} sentences of 4 to 128 tokens, {prepared.how}", prepared.turn, count, setup, seconds)]


def generation_rate(setup: Setup, seconds: float) -> Sequence[Case]:
    prepared = text_by_transformers(setup, {"dtype": "fp32", "compiled": False})
    tokens = new_tokens(setup)
    return [_rate(f"{tokens} tokens after 32 with transformers, {prepared.how}", prepared.turn, tokens, setup, seconds)]


def cache_speed(setup: Setup, seconds: float) -> Sequence[Case]:
    before, after = (
        text_by_transformers(setup, {"dtype": "fp32", "compiled": False, "cached": cached}) for cached in (False, True)
    )
    measured = compared(before.turn, after.turn, setup, seconds)
    return [Case(condition=f"GPT-2 124M, {new_tokens(setup)} tokens after 32, fp32", measured=measured)]


def _rate(condition: str, step: Step, items: int, setup: Setup, seconds: float) -> Case:
    found = measure(step, synchronize=wait_of(setup), warmup=2, min_samples=5, max_seconds=max(seconds, 10.0))
    interval = found.interval_seconds
    low, high = (None, None) if interval is None else (items / interval[1], items / interval[0])
    count = len(found.samples_seconds)
    return Case(
        condition=condition, measured=Speedup(ratio=items / found.median_seconds, low=low, high=high, pairs=count)
    )


# JAX


def jax_speed(setup: Setup, seconds: float) -> Sequence[Case]:
    """The same MLP's step of SGD, by jax.jit and by torch.compile."""
    jax, jnp = peer_package("jax"), peer_package("jax.numpy")
    sizes = (784, 1024, 1024, 10)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(sizes[0], sizes[1]),
        nn.ReLU(),
        nn.Linear(sizes[1], sizes[2]),
        nn.ReLU(),
        nn.Linear(sizes[2], sizes[3]),
    ).to(setup.device)
    inputs, targets = torch.randn(128, sizes[0]), torch.randint(0, 10, (128,))
    weights = [
        (jnp.asarray(layer.weight.detach().cpu().numpy().T), jnp.asarray(layer.bias.detach().cpu().numpy()))
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
    theirs_inputs, theirs_targets = jnp.asarray(inputs.numpy()), jnp.asarray(targets.numpy())

    def loss(parameters: Untyped, x: Untyped, y: Untyped) -> object:
        for place, (weight, bias) in enumerate(parameters):
            x = x @ weight + bias
            x = jax.nn.relu(x) if place + 1 < len(parameters) else x
        return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(len(y)), y])

    def update(parameters: Untyped, x: Untyped, y: Untyped) -> object:
        gradients = jax.grad(loss)(parameters, x, y)
        return jax.tree.map(lambda value, gradient: value - 1e-3 * gradient, parameters, gradients)

    state, step = [weights], jax.jit(update)

    def by_jax() -> None:
        state[0] = jax.block_until_ready(step(state[0], theirs_inputs, theirs_targets))

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    compiled, batch = torch.compile(model), (inputs.to(setup.device), targets.to(setup.device))

    def by_torch() -> None:
        optimizer.zero_grad()
        loss_of(compiled, batch).backward()
        optimizer.step()

    measured = compared(by_torch, by_jax, setup, seconds)
    return [Case(condition="MLP 784-1024-1024-10 training, jax.jit against torch.compile", measured=measured)]
