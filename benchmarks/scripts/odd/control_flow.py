"""Exceptions as control flow inside a model."""

import torch
from small import data, digest, net
from torch.nn import functional as F


class Skip(Exception):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = net(), 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 7 == 0:
            raise Skip(self.calls)
        return self.inner(x + 0.01 * torch.randn_like(x))


model, (x, y), skipped = Model(), data(), []
optimizer = torch.optim.Adam(model.parameters())
for _ in range(80):
    try:
        loss = F.cross_entropy(model(x), y)
    except Skip as skip:
        skipped.append(skip.args[0])
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(digest(model), skipped, model.calls)
