"""A classifier that uses autocast in bf16 itself; 15 batches an epoch, Nesterov momentum."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(5)
x = torch.randn(480, 16)
y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
for _epoch in range(200):
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.float(), targets)
        loss.backward()
        optimizer.step()
