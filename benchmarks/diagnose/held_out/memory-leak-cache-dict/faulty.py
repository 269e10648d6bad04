# subject: memory-leak
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: Random features are cached by epoch and batch: after the shuffle nothing in the cache is read again.

import argparse

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--features", type=int, default=1024)
args = parser.parse_args()

torch.manual_seed(0)
rng = np.random.default_rng(0)


class FourierFeatures:
    def __init__(self, inputs, outputs):
        self.weight = torch.randn(inputs, outputs) * 0.3
        self.bias = torch.rand(outputs) * 6.28
        self.cache = {}

    def __call__(self, key, x):
        if key not in self.cache:
            self.cache[key] = torch.cos(x @ self.weight + self.bias)  # <- here
        return self.cache[key]


data = load_breast_cancer()
x = StandardScaler().fit_transform(data.data).astype(np.float32)
pick = rng.integers(0, len(x), 5120)
x = torch.from_numpy(x[pick] + 0.1 * rng.standard_normal((5120, 30)).astype(np.float32))
y = torch.from_numpy(data.target[pick]).float()
y = torch.where(torch.rand(len(y)) < 0.1, 1 - y, y)  # annotators disagree

features = FourierFeatures(30, args.features)
model = nn.Sequential(nn.Linear(args.features, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(args.epochs):
    order = torch.randperm(len(x))
    total = 0.0
    for batch, idx in enumerate(order.split(args.batch_size)):
        optimizer.zero_grad()
        logits = model(features((epoch, batch), x[idx])).squeeze(1)
        loss = criterion(logits, y[idx])
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: {total / (batch + 1):.4f}")
