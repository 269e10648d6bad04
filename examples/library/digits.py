"""Train a ConvNet on scikit-learn's digits with the library; start it again after an interruption and it goes on.

python examples/library/digits.py --epochs 20 --folder runs/digits
python examples/library/digits.py --evaluate --folder runs/digits
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import flatout
from flatout.models import ConvNet, ConvNetConfig


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(train, test) of (images [samples, 1, 8, 8], labels [samples])."""
    digits = load_digits()
    images, labels = (digits.images / 16.0).astype(np.float32)[:, None], digits.target
    for_test = np.arange(len(labels)) % 5 == 4
    return (images[~for_test], labels[~for_test]), (images[for_test], labels[for_test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", default="runs/digits")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the best checkpoint")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    device = flatout.device()
    train_data, test_data = load_data()
    model = ConvNet(ConvNetConfig(channels=1, height=8, width=8, classes=10)).to(device)
    loss_fn = flatout.supervised(nn.CrossEntropyLoss())
    test = flatout.batches(test_data, 256, shuffle=False, device=device)
    checkpoints = flatout.Checkpoints(arguments.folder, best="max", asynchronous=True)

    if arguments.evaluate:
        best = checkpoints.best()
        if best is None:
            raise SystemExit(f"no checkpoint in {arguments.folder}: train first")
        flatout.restore(best, model=model, generators=False)
        figures = flatout.evaluate(model, test, loss_fn.metrics)
        print(f"step {best.step}: test loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.2%}")
        return

    plan = flatout.Plan(precision=arguments.precision, memory_format="channels_last", optimizer="fused")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    train = flatout.batches(train_data, 64, plan, seed=arguments.seed, device=device)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=arguments.epochs * len(train))
    step = flatout.TrainStep(model, optimizer, loss_fn, plan, clip_norm=1.0, scheduler=scheduler)
    result = flatout.fit(
        step,
        train,
        epochs=arguments.epochs,
        evaluation=lambda: flatout.evaluate(step, test),
        metric="accuracy",
        checkpoints=checkpoints,
    )
    resumed = f" after step {result.resumed_at_step}" if result.resumed_at_step is not None else ""
    print(f"{result.steps} steps{resumed}, {result.epochs} epochs in all")
    if result.evaluations:
        last = result.evaluations[-1]
        print(f"test loss {last['loss']:.4f}, accuracy {last['accuracy']:.2%}")


if __name__ == "__main__":
    main()
