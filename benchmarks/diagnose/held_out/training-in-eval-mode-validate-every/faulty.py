# subject: training-in-eval-mode
# thread: https://github.com/joeynmt/joeynmt/issues/184
# steps: 240
# gain: no
# device: cpu
# what: Validation every 20 updates leaves the model in evaluation mode until the next epoch begins.

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn


def load():
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    order = torch.randperm(len(y))
    return (x[order[:448]], y[order[:448]]), (x[order[448:]], y[order[448:]])


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        right = ((model(x).squeeze(1) > 0).float() == y).float().mean().item()
    return right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--validate-every", type=int, default=20)
    parser.add_argument("--dropout", type=float, default=0.4)
    args = parser.parse_args()
    torch.manual_seed(42)
    (x, y), held_out = load()
    model = nn.Sequential(
        nn.Linear(30, 600),
        nn.ReLU(),
        nn.Dropout(args.dropout),
        nn.Linear(600, 600),
        nn.ReLU(),
        nn.Dropout(args.dropout),
        nn.Linear(600, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    updates = 0
    for epoch in range(args.epochs):
        model.train()
        for _ in range(40):
            rows = torch.randint(0, len(x), (96,))
            out = model(x[rows]).squeeze(1)  # <- here
            loss = nn.functional.binary_cross_entropy_with_logits(out, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            if updates % args.validate_every == 0:
                accuracy = validate(model, *held_out)  # <- here
                if updates % 80 == 0:
                    print(f"update {updates}: loss {loss.item():.4f}, validation {accuracy:.3f}")


main()
