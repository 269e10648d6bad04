# subject: python-time
# thread: own
# steps: 200
# gain: yes
# device: cpu
# what: Smoothed labels are written element by element in two Python loops, every step.

from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

SEED, EPOCHS, BATCH, CLASSES, EPS = 7, 5, 160, 10, 0.1
torch.manual_seed(SEED)

X, y = load_digits(return_X_y=True)
X = torch.tensor(X / 16, dtype=torch.float32)
y = torch.tensor(y)
pick = torch.randint(0, len(X), (6400,))
X, y = X[pick] + 0.1 * torch.randn(6400, 64), y[pick]


def smooth(labels):
    target = torch.zeros(len(labels), CLASSES)
    for i in range(len(labels)):  # <- here
        for c in range(CLASSES):  # <- here
            if labels[i] == c:  # <- here
                target[i, c] = 1 - EPS + EPS / CLASSES  # <- here
            else:
                target[i, c] = EPS / CLASSES  # <- here
    return target


sizes = [64, 1024, 1024, 1024, 1024]
layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
net = nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))
opt = torch.optim.Adam(net.parameters(), lr=3e-4)
for epoch in range(EPOCHS):
    perm = torch.randperm(len(X))
    total = 0.0
    for start in range(0, len(X), BATCH):
        rows = perm[start : start + BATCH]
        target = smooth(y[rows])  # <- here
        log_probs = F.log_softmax(net(X[rows]), dim=1)
        loss = -(target * log_probs).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total * BATCH / len(X):.4f}")
