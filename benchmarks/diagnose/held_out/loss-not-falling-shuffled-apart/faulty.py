# subject: loss-not-falling
# thread: own
# steps: 400
# gain: no
# device: cpu
# what: Inputs and labels are shuffled by two different permutations every epoch.

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

np.random.seed(10)
torch.manual_seed(10)
digits = load_digits()
X = (digits.data / 16.0).astype(np.float32)
y = digits.target.astype(np.int64)
pick = np.random.randint(0, len(X), 6400)
X = X[pick] + 0.1 * np.random.randn(6400, 64).astype(np.float32)
y = y[pick]


def shuffled(X, y):
    order = np.random.permutation(len(X))
    return X[order], y[np.random.permutation(len(y))]  # <- here


model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
criterion = nn.CrossEntropyLoss()
history = []
for epoch in range(10):
    Xs, ys = shuffled(X, y)  # <- here
    for i in range(0, len(Xs), 160):
        xb = torch.from_numpy(Xs[i : i + 160])
        yb = torch.from_numpy(ys[i : i + 160])
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)  # <- here
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    print("epoch", epoch, "loss", np.mean(history[-40:]).round(4))
