"""Training steps: ResNet-50, GPT-2 124M, BERT-base, and a small GPT in fp32, which is what torch.compile is tried on.

Data are random and already on the device; the optimizer is AdamW. Peers run in bf16 with the fused optimizer, and their
grid is compiled or not, for images in either layout. Flatout's plan comes from `flatout.tune(step, batches)`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flatout.bench.workload import Contender, Found, Prepared, Settings, Setup, Untyped, Workload, peer_package
from flatout.flops import count_step
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import choices_of_plan
from flatout.models import GPT2, BertConfig, BertMaskedLM, GPT2Config, ResNet
from flatout.plan import Plan
from flatout.plan_choices import Exactness
from flatout.train.step import TrainStep
from flatout.tuning.step_tuning import tune_step

Batch = tuple[Tensor, Tensor]
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on what."""

    model: Callable[[], nn.Module]
    batch: Callable[[Setup], Batch]
    images: bool = False
    exactness: Exactness = "reduced"
    """What Flatout may try: as exact as the peers are."""

    def start(self, setup: Setup, *, channels_last: bool = False) -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        model, (inputs, targets) = self.model().to(setup.device), self.batch(setup)
        inputs, targets = inputs.to(setup.device), targets.to(setup.device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return model, (inputs, targets)


def loss_of(model: Untyped, batch: Untyped) -> Tensor:
    """Cross-entropy in fp32 over the classes or the vocabulary."""
    inputs, targets = batch
    scores: Tensor = model(inputs)
    return nn.functional.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


# contenders


def plain(training: Training, setup: Setup, settings: Settings) -> Prepared:
    model, batch = training.start(setup)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    compiled = bool(settings.get("compiled"))
    return _prepared(torch.compile(model) if compiled else model, optimizer, batch, "fp32" + ", compiled" * compiled)


def by_hand(training: Training, setup: Setup, settings: Settings) -> Prepared:
    """Autocast to bf16 and the fused optimizer, written into the loop."""
    model, optimizer, batch = _as_peers_do(training, setup, settings)
    cast = torch.autocast(setup.device, torch.bfloat16)
    called = torch.compile(model) if settings["compiled"] else model
    return _prepared(called, optimizer, batch, _in_words(settings), cast=cast)


def fabric(training: Training, setup: Setup, settings: Settings) -> Prepared:
    engine = peer_package("lightning.fabric").Fabric(accelerator=setup.device, devices=1, precision="bf16-mixed")
    raw, plain_optimizer, batch = _as_peers_do(training, setup, settings)
    model, optimizer = engine.setup(torch.compile(raw) if settings["compiled"] else raw, plain_optimizer)
    return _prepared(model, optimizer, batch, _in_words(settings), backward=engine.backward)


def accelerate(training: Training, setup: Setup, settings: Settings) -> Prepared:
    backend = "inductor" if settings["compiled"] else "no"
    engine = peer_package("accelerate").Accelerator(
        cpu=setup.device == "cpu", mixed_precision="bf16", dynamo_backend=backend
    )
    raw, plain_optimizer, batch = _as_peers_do(training, setup, settings)
    model, optimizer = engine.prepare(raw, plain_optimizer)
    return _prepared(model, optimizer, batch, _in_words(settings), backward=engine.backward)


def tuned(training: Training, setup: Setup, settings: Settings) -> Prepared:
    """By a plan that `search` found."""
    plan = Plan.from_toml(str(settings["plan"]), "the plan that was found")
    model, batch = training.start(setup)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE), loss_of, plan)
    levers = [choice.label for choice in choices_of_plan(plan.choices(), LEVERS, plan.proved_reduced)]
    return Prepared(turn=lambda: step(batch).item(), how=", ".join(levers) or "nothing that was tried helps")


def search(training: Training, setup: Setup, seconds: float) -> Found:
    model, batch = training.start(setup)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    step = TrainStep(model, optimizer, loss_of)
    found = tune_step(
        step,
        [batch],
        exactness=training.exactness,
        budget_seconds=seconds,
        steps=None,
        progress=lambda text: None,
    )
    note = f"tuned in {found.seconds:.0f} s"
    if not found.plan.choices():
        note = f"{note}: {found.reason}"
    return Found(settings={"plan": found.plan.to_toml()}, note=note)


def _prepared(
    model: Untyped,
    optimizer: Untyped,
    batch: Batch,
    how: str,
    *,
    cast: AbstractContextManager[object] | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Prepared:
    def step() -> float:
        optimizer.zero_grad()
        with cast or contextlib.nullcontext():
            loss = loss_of(model, batch)
        backward(loss)
        optimizer.step()
        return float(loss.item())

    def flops() -> float:
        finish = count_step()
        step()
        return finish()

    return Prepared(turn=step, how=how, flops=flops)


def _as_peers_do(
    training: Training, setup: Setup, settings: Settings
) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    model, batch = training.start(setup, channels_last=bool(settings["channels_last"]))
    return model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True), batch


def _in_words(settings: Settings) -> str:
    layout, compiled = ", channels_last" * bool(settings["channels_last"]), ", compiled" * bool(settings["compiled"])
    return f"bf16, fused AdamW{layout}{compiled}"


def peer_grid(training: Training, setup: Setup) -> Sequence[Settings]:
    """Compiled or not, and for images in either layout; a quick bench has one setting."""
    if setup.quick:
        return ({"compiled": setup.device == "cuda", "channels_last": training.images},)
    layouts = (False, True) if training.images else (False,)
    return [{"compiled": one, "channels_last": other} for one, other in itertools.product((False, True), layouts)]


# workloads


def _contenders(training: Training) -> tuple[Contender, ...]:
    grid = partial(peer_grid, training)
    return (
        Contender(name="plain torch", role="plain", prepare=partial(plain, training)),
        Contender(name="autocast by hand", role="peer", prepare=partial(by_hand, training), grid=grid),
        Contender(name="Fabric", role="peer", prepare=partial(fabric, training), grid=grid),
        Contender(name="Accelerate", role="peer", prepare=partial(accelerate, training), grid=grid),
        _tuned(training),
    )


def _tuned(training: Training) -> Contender:
    return Contender(
        name="flatout, tuned", role="flatout", prepare=partial(tuned, training), search=partial(search, training)
    )


def _image_count(setup: Setup) -> int:
    """On a GPU as many as the guides take."""
    return 4 if setup.reduced else 64 if setup.device == "cuda" else 16


def _image_size(setup: Setup) -> int:
    return 112 if setup.reduced else 224


def _images(setup: Setup) -> Batch:
    count, size = _image_count(setup), _image_size(setup)
    return torch.randn(count, 3, size, size), torch.randint(0, 1000, (count,))


def _text_shape(setup: Setup) -> tuple[int, int]:
    return (1, 128) if setup.reduced else (8, 1024) if setup.device == "cuda" else (4, 256)


def _text(setup: Setup) -> Batch:
    rows, length = _text_shape(setup)
    tokens = torch.randint(0, 50257, (rows, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _masked_shape(setup: Setup) -> tuple[int, int]:
    return (2, 128) if setup.reduced else (32, 128) if setup.device == "cuda" else (8, 128)


def _masked(setup: Setup) -> Batch:
    """One token in seven is to be predicted."""
    tokens = torch.randint(0, 30522, _masked_shape(setup))
    return tokens, torch.where(torch.rand(tokens.shape) < 0.15, tokens, -100)


SMALL_GPT = GPT2Config(
    vocab_size=512,
    max_tokens=128,
    width=128,
    heads=4,
    layers=4,
    dropout=0.0,
    embedding_dropout=0.0,
    attention_dropout=0.0,
)


def _small_text(setup: Setup) -> Batch:
    tokens = torch.randint(0, SMALL_GPT.vocab_size, (16, 129))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


RESNET = Training(model=ResNet, batch=_images, images=True)
_GPT2 = GPT2Config(max_tokens=1024, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)
GPT = Training(model=partial(GPT2, _GPT2), batch=_text)
BERT = Training(model=partial(BertMaskedLM, BertConfig.base(dropout=0.0, attention_dropout=0.0)), batch=_masked)
SMALL = Training(model=partial(GPT2, SMALL_GPT), batch=_small_text, exactness="rounding")


def _of_text(key: str, title: str, training: Training, shape: Callable[[Setup], tuple[int, int]]) -> Workload:
    return Workload(
        key=key,
        title=title,
        unit="tokens",
        guides="",
        size=lambda setup: "{} x {} tokens a step".format(*shape(setup)),
        items=lambda setup: math.prod(shape(setup)),
        contenders=_contenders(training),
        flops_of="plain torch",
    )


RESNET50 = Workload(
    key="resnet50-training",
    title="ResNet-50 training",
    unit="images",
    guides="1,850 images/s on an RTX 4090 with batch 64 and AMP",
    size=lambda setup: f"{_image_count(setup)} images of {_image_size(setup)} x {_image_size(setup)} a step",
    items=_image_count,
    contenders=_contenders(RESNET),
    flops_of="plain torch",
)
GPT2_124M = _of_text("gpt2-training", "GPT-2 124M training", GPT, _text_shape)
BERT_BASE = _of_text("bert-training", "BERT-base training", BERT, _masked_shape)
COMPILE = Workload(
    key="compile",
    title="torch.compile, a small GPT trained in fp32",
    unit="tokens",
    guides="torch.compile gives 1.3x to 2x",
    size=lambda setup: "16 x 128 tokens a step",
    items=lambda setup: 16 * 128,
    contenders=(
        Contender(name="plain torch", role="plain", prepare=partial(plain, SMALL)),
        Contender(
            name="torch.compile", role="peer", prepare=partial(plain, SMALL), grid=lambda setup: ({"compiled": True},)
        ),
        _tuned(SMALL),
    ),
    flops_of="plain torch",
)
