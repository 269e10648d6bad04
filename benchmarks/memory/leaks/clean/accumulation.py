"""Gradients add up over four batches."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
running = 0.0

for number in range(800):
    loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(0, 4, (32,))) / 4
    loss.backward()
    running += loss.item()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
