"""How the guides' claims are measured: plain torch with and without what the guide advises, in turns in one process.

Each function takes the setup and the seconds for each of its cases, and returns the cases. Nothing of Flatout's own
speed-ups takes part: it is the advice that is measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.bench.claim import Case
from flatout.bench.inference import bert_by_transformers, new_tokens, sentence_count, text_by_transformers
from flatout.bench.results import Speedup
from flatout.bench.training import RESNET, SMALL, Batch, Training, loss_of
from flatout.bench.workload import Setup, peer_package
from flatout.memory.real_run import LimitedRun
from flatout.models import MLP, ConvNet, ConvNetConfig, MLPConfig
from flatout.statistics import compare_paired, median
from flatout.timing import interleave, measure

Step = Callable[[], object]
MOST_ROUNDS = 40
UNLIMITED_BYTES = 1 << 62


def _mlp_batch(setup: Setup) -> Batch:
    return torch.randn(128, 784), torch.randint(0, 10, (128,))


def _image_batch(setup: Setup) -> Batch:
    return torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))


def _large_images(setup: Setup) -> Batch:
    count, size = (2, 64) if setup.quick else (8, 224)
    return torch.randn(count, 3, size, size), torch.randint(0, 1000, (count,))


MODELS = {
    "MLP 784-1024-1024-10": Training(model=lambda: MLP(MLPConfig(inputs=784, hidden=(1024, 1024))), batch=_mlp_batch),
    "ConvNet on 32 x 32": Training(
        model=lambda: ConvNet(ConvNetConfig(height=32, width=32)), batch=_image_batch, images=True
    ),
    "GPT of 4 layers, width 128": SMALL,
    "ResNet-50": Training(model=RESNET.model, batch=_large_images, images=True),
}
"""What training claims are tried on."""


def compared(before: Step, after: Step, setup: Setup, seconds: float) -> Speedup:
    """How many times as fast `after` is."""
    wait = torch.cuda.synchronize if setup.device == "cuda" else None
    found = interleave(
        {"before": before, "after": after}, rounds=MOST_ROUNDS, synchronize=wait, max_seconds=seconds, warmup=2
    )
    return Speedup.of(compare_paired(found["before"].samples_seconds, found["after"].samples_seconds))


def exactly(ratio: float) -> Speedup:
    """A ratio that does not vary."""
    return Speedup(ratio=ratio, low=None, high=None, pairs=1)


def training_step(
    training: Training,
    setup: Setup,
    *,
    amp: bool = False,
    compiled: str | None = None,
    channels_last: bool = False,
    set_to_none: bool = True,
    model_of: Callable[[nn.Module], Callable[..., Any]] | None = None,
) -> Step:
    """A step of AdamW. amp: as the guides write it, fp16 with a gradient scaler on a GPU; bf16 on a CPU."""
    model, batch = training.start(setup, channels_last=channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    called: Any = model if model_of is None else model_of(model)
    if compiled is not None:
        called = torch.compile(called, mode=compiled)
    dtype = torch.float16 if setup.device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(setup.device, enabled=amp and dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast(setup.device, dtype, enabled=amp):
            loss = loss_of(called, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def peak_bytes(step: Step, setup: Setup) -> int:
    """The most that tensors hold during a step, beyond what they hold before."""
    step()  # the optimizer's state is there from now on
    if setup.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with LimitedRun("cpu", UNLIMITED_BYTES) as run:
        step()
    return run.peak_bytes


# precision


def _amp_name(setup: Setup) -> str:
    return "fp16 with a scaler" if setup.device == "cuda" else "bf16"


def amp_speed(setup: Setup, seconds: float) -> Sequence[Case]:
    return [
        Case(
            condition=f"{name} training, {_amp_name(setup)}",
            measured=compared(training_step(training, setup), training_step(training, setup, amp=True), setup, seconds),
        )
        for name, training in MODELS.items()
    ]


def amp_memory(setup: Setup, seconds: float) -> Sequence[Case]:
    """Without weights and the optimizer's state, which stay in fp32."""
    cases = []
    for name, training in MODELS.items():
        plain = peak_bytes(training_step(training, setup), setup)
        amp = peak_bytes(training_step(training, setup, amp=True), setup)
        cases.append(
            Case(
                condition=f"{name}, a step's own memory, {_amp_name(setup)}",
                measured=exactly(plain / amp),
                note="beside weights and optimizer, which stay in fp32",
            )
        )
    return cases


def amp_accuracy(setup: Setup, seconds: float) -> Sequence[Case]:
    """An MLP that learns a random function with ten classes: the share of the fp32 accuracy that AMP reaches."""
    steps = 100 if setup.quick else 400
    reached = {amp: median([_accuracy(setup, steps, seed, amp=amp) for seed in range(3)]) for amp in (False, True)}
    return [
        Case(
            condition=f"MLP after {steps} steps, three seeds, {_amp_name(setup)}",
            measured=exactly(reached[True] / reached[False]),
            note=f"{reached[False]:.1%} right in fp32, {reached[True]:.1%} with AMP",
        )
    ]


def _accuracy(setup: Setup, steps: int, seed: int, *, amp: bool) -> float:
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(setup.device)
    model = MLP(MLPConfig(inputs=64, hidden=(256, 256))).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    dtype = torch.float16 if setup.device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(setup.device, enabled=amp and dtype == torch.float16)
    generator = torch.Generator(setup.device).manual_seed(seed)

    def draw(count: int) -> Batch:
        inputs = torch.randn(count, 64, generator=generator, device=setup.device)
        with torch.no_grad():
            return inputs, teacher(inputs).argmax(1)

    for _ in range(steps):
        inputs, targets = draw(256)
        optimizer.zero_grad()
        with torch.autocast(setup.device, dtype, enabled=amp):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    inputs, targets = draw(4096)
    with torch.no_grad(), torch.autocast(setup.device, dtype, enabled=amp):
        return float((model(inputs).argmax(1) == targets).double().mean())


def tf32(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for size in (1024, 4096, 8192):
        a, b = (torch.randn(size, size, device="cuda") for _ in "ab")

        def product(precision: str, a: Tensor = a, b: Tensor = b) -> Step:
            def run() -> None:
                torch.backends.cuda.matmul.fp32_precision = precision
                a @ b

            return run

        cases.append(
            Case(
                condition=f"products of {size} x {size}",
                measured=compared(product("ieee"), product("tf32"), setup, seconds),
            )
        )
    return cases


# compilation


def compile_speed(setup: Setup, seconds: float) -> Sequence[Case]:
    found = []
    for name, training in MODELS.items():
        compiled = training_step(training, setup, compiled="default")
        began = time.perf_counter()
        compiled()
        first_seconds = time.perf_counter() - began
        speedup = compared(training_step(training, setup), compiled, setup, seconds)
        found.append(
            Case(
                condition=f"{name} training, fp32", measured=speedup, note=f"the first step took {first_seconds:.0f} s"
            )
        )
    return found


def first_call(setup: Setup, seconds: float) -> Sequence[Case]:
    """How many times as long the first call of a compiled model takes as later ones."""
    training = MODELS["MLP 784-1024-1024-10"]
    model, (inputs, _) = training.start(setup)
    compiled = torch.compile(model)
    torch._dynamo.reset()  # other claims may have compiled it already
    began = time.perf_counter()
    with torch.no_grad():
        compiled(inputs)
        first = time.perf_counter() - began
        later = measure(lambda: compiled(inputs), max_seconds=seconds).median_seconds
    note = f"{first:.1f} s, then {later * 1e6:.0f} µs; a cache on disk shortens it"
    return [Case(condition="MLP inference", measured=exactly(first / later), note=note)]


def reduce_overhead(setup: Setup, seconds: float) -> Sequence[Case]:
    return [
        Case(
            condition=f"{name} training",
            measured=compared(
                training_step(training, setup, compiled="default"),
                training_step(training, setup, compiled="reduce-overhead"),
                setup,
                seconds,
            ),
        )
        for name, training in MODELS.items()
    ]


# layouts, gradients, memory


def channels_last(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for name in ("ConvNet on 32 x 32", "ResNet-50"):
        training = MODELS[name]
        for amp in (False, True):
            before = training_step(training, setup, amp=amp)
            after = training_step(training, setup, amp=amp, channels_last=True)
            dtype = _amp_name(setup) if amp else "fp32"
            cases.append(Case(condition=f"{name} training, {dtype}", measured=compared(before, after, setup, seconds)))
    return cases


def set_to_none(setup: Setup, seconds: float) -> Sequence[Case]:
    """Whole steps: what the option does to `zero_grad` alone is not what a user waits for."""
    return [
        Case(
            condition=f"{name}, a whole training step",
            measured=compared(
                training_step(training, setup, set_to_none=False), training_step(training, setup), setup, seconds
            ),
        )
        for name, training in MODELS.items()
    ]


class _Deep(nn.Module):
    """Blocks whose activations are most of a step's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(24)))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


_DEEP = Training(model=_Deep, batch=lambda setup: (torch.randn(2048, 256), torch.randint(0, 10, (2048,))))


def _checkpointed(model: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        out: Tensor = model.head(checkpoint_sequential(model.blocks, 6, x.requires_grad_(), use_reentrant=False))
        return out

    return call


def checkpointing_memory(setup: Setup, seconds: float) -> Sequence[Case]:
    plain = peak_bytes(training_step(_DEEP, setup), setup)
    less = peak_bytes(training_step(_DEEP, setup, model_of=_checkpointed), setup)
    return [Case(condition="24 linear layers in 6 segments", measured=exactly(plain / less))]


def checkpointing_time(setup: Setup, seconds: float) -> Sequence[Case]:
    """How many times as long a step takes."""
    plain, less = training_step(_DEEP, setup), training_step(_DEEP, setup, model_of=_checkpointed)
    return [Case(condition="24 linear layers in 6 segments", measured=compared(less, plain, setup, seconds))]


def accumulation_memory(setup: Setup, seconds: float) -> Sequence[Case]:
    """One batch, against the same in four parts whose gradients are added."""
    model, (inputs, targets) = _DEEP.start(setup)

    def step(parts: int) -> Step:
        def run() -> None:
            model.zero_grad()
            for part, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (loss_of(model, (part, wanted)) / parts).backward()

        return run

    whole, parts = peak_bytes(step(1), setup), peak_bytes(step(4), setup)
    return [Case(condition="24 linear layers, batch 2,048 as 4 x 512", measured=exactly(whole / parts))]


def without_gradients(setup: Setup, seconds: float) -> Sequence[Case]:
    cases = []
    for name in ("MLP 784-1024-1024-10", "GPT of 4 layers, width 128", "ResNet-50"):
        model, (inputs, _) = MODELS[name].start(setup)
        model.eval()
        before, after = _forward(model, inputs, contextlib.nullcontext), _forward(model, inputs, torch.inference_mode)
        cases.append(
            Case(
                condition=f"{name}, memory of a forward pass",
                measured=exactly(peak_bytes(before, setup) / peak_bytes(after, setup)),
            )
        )
    return cases


def _forward(model: nn.Module, inputs: Tensor, mode: Callable[[], Any]) -> Step:
    kept: list[Tensor] = []

    def run() -> None:
        kept.clear()
        with mode():
            kept.append(model(inputs))

    return run


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
    datasets: dict[str, Dataset[Any]] = {
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


def _epoch(dataset: Dataset[Any], workers: int) -> Step:
    loader: DataLoader[Any] = DataLoader(
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
    def with_benchmark(wanted: bool, step: Step) -> Step:
        def run() -> None:
            torch.backends.cudnn.benchmark = wanted
            step()

        return run

    cases = []
    for name in ("ConvNet on 32 x 32", "ResNet-50"):
        step = training_step(MODELS[name], setup, amp=True)
        measured = compared(with_benchmark(False, step), with_benchmark(True, step), setup, seconds)
        cases.append(Case(condition=f"{name} training, fixed input size", measured=measured))
    return cases


# GPU against CPU


def gpu_against_cpu(setup: Setup, seconds: float) -> Sequence[Case]:
    return [_on_both(name, setup, seconds) for name in MODELS]


def tiny_on_gpu(setup: Setup, seconds: float) -> Sequence[Case]:
    """How many times as fast the CPU is at a tiny model."""
    tiny = Training(
        model=lambda: MLP(MLPConfig(inputs=16, hidden=(32,))),
        batch=lambda setup: (torch.randn(16, 16), torch.randint(0, 10, (16,))),
    )
    on_gpu, on_cpu = training_step(tiny, setup), training_step(tiny, Setup(device="cpu", quick=setup.quick))
    return [Case(condition="MLP 16-32-10, batch 16", measured=compared(on_gpu, on_cpu, setup, seconds))]


def _on_both(name: str, setup: Setup, seconds: float) -> Case:
    on_cpu = training_step(MODELS[name], Setup(device="cpu", quick=setup.quick))
    on_gpu = training_step(MODELS[name], setup)
    return Case(condition=f"{name} training, fp32", measured=compared(on_cpu, on_gpu, setup, seconds))


# the table's rates, with the guides' settings


def resnet_rate(setup: Setup, seconds: float) -> Sequence[Case]:
    """Batch 64 with AMP."""
    count = 4 if setup.quick else 64
    training = Training(
        model=RESNET.model, batch=lambda setup: (torch.randn(count, 3, 224, 224), torch.randint(0, 1000, (count,)))
    )
    step = training_step(training, setup, amp=True)
    return [_rate(f"batch {count}, AMP in {_amp_name(setup)}", step, count, setup, seconds)]


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
    wait = torch.cuda.synchronize if setup.device == "cuda" else None
    found = measure(step, synchronize=wait, warmup=2, min_samples=5, max_seconds=max(seconds, 10.0))
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

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        for place, (weight, bias) in enumerate(parameters):
            x = x @ weight + bias
            x = jax.nn.relu(x) if place + 1 < len(parameters) else x
        return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(len(y)), y])

    def update(parameters: Any, x: Any, y: Any) -> Any:
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
