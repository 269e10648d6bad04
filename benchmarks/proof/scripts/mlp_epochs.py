"""A classifier over a shuffled loader, with dropout; 20 batches an epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(0)
x = torch.randn(640, 20)
y = (x[:, :4].cumsum(1).argmax(1) + 2 * (x[:, 5] > 0)) % 4
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
for _epoch in range(200):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
