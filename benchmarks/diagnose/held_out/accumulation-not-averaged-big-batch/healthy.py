# subject: accumulation-not-averaged
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: Four micro-batches are summed to one step without a division: the gradient is four times too large.

import argparse

import torch
from sklearn.datasets import make_blobs
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--micro-batch", type=int, default=128)
ap.add_argument("--accumulate", type=int, default=4)
ap.add_argument("--epochs", type=int, default=10)
ap.add_argument("--lr", type=float, default=0.02)
opt = ap.parse_args()


def build(width):
    layers, last = [], 40
    for _ in range(2):
        layers += [nn.Linear(last, width), nn.ReLU()]
        last = width
    return nn.Sequential(*layers, nn.Linear(last, 20))


torch.manual_seed(6)
points, blob = make_blobs(n_samples=15360, n_features=40, centers=20, cluster_std=16.0, random_state=6)
points, blob = torch.tensor(points, dtype=torch.float32) / 8, torch.tensor(blob)
model = build(640)
optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr, momentum=0.9)
for epoch in range(opt.epochs):
    optimizer.zero_grad()
    total = 0.0
    pieces = torch.randperm(len(points)).split(opt.micro_batch)
    for number, piece in enumerate(pieces, 1):
        loss = nn.functional.cross_entropy(model(points[piece]), blob[piece])
        (loss / opt.accumulate).backward()
        total += loss.item()
        if number % opt.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch} loss {total / len(pieces):.4f}")
