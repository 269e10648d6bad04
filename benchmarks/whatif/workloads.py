"""Training steps whose times are predicted and measured: the guides' families, from tiny to large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatout import Plan, TrainStep, models

PLANS = {
    "fp32": Plan(),
    "tf32": Plan(matmul_precision="high"),
    "bf16": Plan(precision="bf16"),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`batch(samples)` is what a step takes: (inputs..., targets)."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    samples: int
    small: bool = False
    """Does a step take under a second on two cores?"""

    def step(self, plan: Plan, device: str) -> TrainStep:
        torch.manual_seed(0)
        model = self.make().to(device)
        return TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-4), _loss, plan)


def _loss(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """The classes are the last dimension of the scores: a text may have as many tokens."""
    inputs, targets = batch
    scores = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    scores = scores[0] if isinstance(scores, tuple) else scores
    return cross_entropy(scores.flatten(0, -2), targets.flatten())


def _images(channels: int, size: int, classes: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda samples: (torch.randn(samples, channels, size, size), torch.randint(classes, (samples,)))


def _features(width: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda samples: (torch.randn(samples, width), torch.randint(10, (samples,)))


def _tokens(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, ...]]:
    def batch(samples: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(vocabulary, (samples, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def _labelled_tokens(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda samples: (torch.randint(vocabulary, (samples, length)), torch.randint(5, (samples,)))


def _gpt2(**sizes: int) -> nn.Module:
    return models.GPT2(models.GPT2Config(**sizes, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0))  # type: ignore[arg-type]


def _bert(**sizes: int) -> nn.Module:
    return models.BertMaskedLM(models.BertConfig(**sizes, dropout=0.0, attention_dropout=0.0))  # type: ignore[arg-type]


def _lstm() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 5000, "embedding_width": 128, "hidden_width": 256, "layers": 2}
    return models.RecurrentClassifier(models.RecurrentClassifierConfig(cell="lstm", classes=5, **sizes))


def _resnet(*stages: int) -> nn.Module:
    return models.ResNet(models.ResNetConfig(stages=stages) if stages else models.ResNetConfig())


WORKLOADS = (
    Workload(
        name="mlp",
        make=lambda: models.MLP(models.MLPConfig(inputs=784, hidden=(256,))),
        batch=_features(784),
        samples=64,
        small=True,
    ),
    Workload(
        name="wide-mlp",
        make=lambda: models.MLP(models.MLPConfig(inputs=1024, hidden=(4096, 4096))),
        batch=_features(1024),
        samples=512,
        small=True,
    ),
    Workload(
        name="convnet",
        make=lambda: models.ConvNet(models.ConvNetConfig(channels=1)),
        batch=_images(1, 28, 10),
        samples=128,
        small=True,
    ),
    Workload(name="small-resnet", make=lambda: _resnet(1, 1), batch=_images(3, 64, 1000), samples=32, small=True),
    Workload(name="resnet50", make=_resnet, batch=_images(3, 224, 1000), samples=64),
    Workload(
        name="char-gpt",
        make=lambda: _gpt2(vocab_size=128, max_tokens=128, width=256, heads=4, layers=4),
        batch=_tokens(128, 128),
        samples=16,
        small=True,
    ),
    Workload(
        name="gpt-50m",
        make=lambda: _gpt2(vocab_size=50257, max_tokens=512, width=512, heads=8, layers=8),
        batch=_tokens(50257, 512),
        samples=16,
    ),
    Workload(name="gpt2-124m", make=lambda: _gpt2(), batch=_tokens(50257, 1024), samples=8),
    Workload(
        name="bert-small",
        make=lambda: _bert(vocab_size=8000, width=256, heads=4, layers=4, inner_width=1024),
        batch=_tokens(8000, 64),
        samples=16,
        small=True,
    ),
    Workload(name="bert-base", make=lambda: _bert(), batch=_tokens(30522, 128), samples=32),
    Workload(name="seq-classifier", make=_lstm, batch=_labelled_tokens(5000, 100), samples=64, small=True),
    Workload(
        name="transformer-lm",
        make=lambda: models.TransformerLM(
            models.TransformerConfig(vocab_size=10000, max_tokens=256, width=512, heads=8, layers=6, dropout=0.0)
        ),
        batch=_tokens(10000, 256),
        samples=16,
    ),
)
