"""BatchNorm's running statistics, and batches that get longer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(200):
    predicted = model(torch.randn(24 + step, 16))
    loss = predicted.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
