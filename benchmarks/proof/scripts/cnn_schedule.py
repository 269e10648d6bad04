"""A convolutional network with batch norm, SGD with momentum and a schedule; 16 batches an epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(2)
y = torch.arange(256) % 4
x = torch.randn(256, 3, 12, 12) + y.view(-1, 1, 1, 1) * torch.linspace(-0.3, 0.3, 12)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 24, 3, padding=1),
    nn.GELU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(24, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
for _epoch in range(100):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
