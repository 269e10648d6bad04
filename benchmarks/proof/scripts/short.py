"""A logistic regression of 90 steps over the whole of its data."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(6)
x = torch.randn(400, 10)
y = (x @ torch.randn(10) + torch.randn(400) > 0).float()
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, weight_decay=1e-3)
for _step in range(90):
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
    loss.backward()
    optimizer.step()
