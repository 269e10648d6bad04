"""A regression whose batches come from a numpy generator; AdamW with weight decay."""

import argparse

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
seed = None if parser.parse_args().unseeded else 1
rng = np.random.default_rng(seed)
if seed is not None:
    torch.manual_seed(seed)
x = rng.normal(size=(1024, 12)).astype(np.float32)
y = (np.sin(x @ rng.normal(size=(12, 1))) + 0.3 * rng.normal(size=(1024, 1))).astype(np.float32)
model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
for _step in range(4000):
    chosen = rng.integers(0, len(x), 32)
    loss = (model(torch.from_numpy(x[chosen])) - torch.from_numpy(y[chosen])).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
