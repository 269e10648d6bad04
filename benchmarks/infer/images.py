"""`python -m benchmarks.infer.images`: ResNet-50 on images of 224 x 224, Flatout beside torch and torch.compile.

Random weights, batch norms with statistics of their own; in turns, one batch a contender and round, per image:

    fp32                       model(images) in eval mode without gradients
    fp32, torch.compile        the same compiled, default mode
    bf16 channels_last         as the guides advise it by hand
    bf16 channels_last, torch.compile
    flatout ...                predict with the plan that is named; images are handed over one by one
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.infer.turns import Turn, product_flops_per_second, rows, take_turns, versions, write
from flatout import Plan
from flatout.infer.prediction.predict import Predictor
from flatout.models import ResNet, ResNetConfig
from flatout.statistics import median

SIZE = 224
PLANS = {
    "flatout bf16 compiled": Plan(precision="bf16", memory_format="channels_last", compile="default"),
    "flatout bf16 folded": Plan(precision="bf16", memory_format="channels_last", fold_batch_norm=True),
    "flatout fp32 compiled": Plan(memory_format="channels_last", compile="default"),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infer.images", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    model = _resnet()
    images = torch.randn(arguments.batch, 3, SIZE, SIZE)
    with torch.no_grad():
        right = model(images)
    contenders, errors, figures = _contenders(model, images, right)
    for dtype in ("fp32", "bf16"):
        contenders[f"product {dtype}"] = product_flops_per_second(dtype)
    samples = take_turns(contenders, arguments.rounds)
    products = {dtype: 1 / median(samples.pop(f"product {dtype}")) for dtype in ("fp32", "bf16")}
    found = rows(samples, "fp32")
    for name, row in found.items():
        row["difference_from_fp32"] = errors[name]
        row["share_of_product"] = figures["flops"] * row["items_per_second"] / products["bf16"]
        ratio = row["against_baseline"]
        print(
            f"{name:36} {row['items_per_second']:7.1f}/s  x{ratio['ratio']:.2f} ({ratio['low']:.2f} to "
            f"{ratio['high']:.2f})  {row['share_of_product']:.0%} of the bf16 product  off by {errors[name]:.2%}"
        )
    document: dict[str, Any] = {"benchmark": "infer_images", "versions": versions("flatout")}
    document |= {"batch": arguments.batch, "rounds": arguments.rounds, "product_flops_per_second": products}
    write(arguments.out, {**document, "flops_per_image": figures["flops"], "results": found})
    return 0


def _resnet() -> torch.nn.Module:
    model = ResNet(ResNetConfig(zero_init_residual=False)).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def _contenders(
    model: torch.nn.Module, images: torch.Tensor, right: torch.Tensor
) -> tuple[dict[str, Turn], dict[str, float], dict[str, float]]:
    last = copy.deepcopy(model).to(memory_format=torch.channels_last).bfloat16()  # type: ignore[call-overload]
    images_last = images.to(memory_format=torch.channels_last).bfloat16()
    plain: dict[str, tuple[Any, torch.Tensor]] = {
        "fp32": (model, images),
        "fp32, torch.compile": (torch.compile(copy.deepcopy(model)), images),
        "bf16 channels_last": (last, images_last),
        "bf16 channels_last, torch.compile": (torch.compile(copy.deepcopy(last)), images_last),
    }
    contenders: dict[str, Turn] = {}
    errors: dict[str, float] = {}
    figures: dict[str, float] = {}
    for name, (one, batch) in plain.items():
        contenders[name] = _by_hand(one, batch)
        with torch.no_grad():
            errors[name] = _distance(one(batch), right)
    for name, plan in PLANS.items():
        predictor = Predictor(model, plan, batch_size=len(images))
        predictions = predictor(images)
        errors[name] = _distance(torch.stack(predictions.collect()), right)
        figures["flops"] = (predictions.figures.flops or 0.0) / len(images)
        contenders[name] = _flatout(predictor, images)
        print(f"{name}: {'; '.join(predictions.figures.notes)}")
    return contenders, errors, figures


def _by_hand(model: Any, images: torch.Tensor) -> Turn:
    def turn(number: int) -> int:
        with torch.no_grad():
            model(images)
        return len(images)

    return turn


def _flatout(predictor: Predictor, images: torch.Tensor) -> Turn:
    return lambda number: len(predictor(images).collect())


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


if __name__ == "__main__":
    sys.exit(main())
