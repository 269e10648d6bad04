"""LBFGS calls its closure many times a step."""

import torch
from small import data, digest, net
from torch.nn import functional as F

model, (x, y), calls = net(), data(), 0
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


for _ in range(15):
    optimizer.step(closure)
print(digest(model), calls)
