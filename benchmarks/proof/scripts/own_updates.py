"""A classifier that clips its gradients and updates its weights by hand, without an optimizer; 20 batches an epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(8)
x = torch.randn(640, 16)
y = (x[:, :3].cumsum(1).argmax(1) + (x[:, 4] > 0)) % 3
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))
rate = 0.1
for _epoch in range(200):
    for inputs, targets in loader:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-rate)
    rate *= 0.99
