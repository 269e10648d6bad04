"""A cache by length: four lengths, so it is full after a few steps."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
masks = {}


def mask(length):
    if length not in masks:
        masks[length] = torch.ones(length, length).tril()
    return masks[length]


for step in range(200):
    length = 8 * (1 + step % 4)
    loss = (mask(length) @ model(torch.randn(length, 16))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
