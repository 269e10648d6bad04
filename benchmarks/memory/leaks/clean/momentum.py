"""Momentum and Adam's state are born in the first step, and stay."""

import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(16, 32), nn.Linear(32, 4)
optimizers = [
    torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9),
    torch.optim.Adam(head.parameters()),
]

for _ in range(200):
    loss = head(encoder(torch.randn(32, 16)).relu()).square().mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
