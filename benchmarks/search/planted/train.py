"""A training loop that wastes a share of its step, and stops wasting it when it is told to.

python train.py --wasted 0.1 [--width 1024 --batch 256]
"""

import argparse
import builtins
import statistics
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--wasted", type=float, required=True, help="as a share of the other work")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()
wasted, width, batch = options.wasted, options.width, options.batch
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
taken = []
while True:
    began = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if len(taken) < 200:
        taken.append(time.perf_counter() - began)
        seconds = wasted * statistics.median(taken)
    until = time.perf_counter() + (0.0 if getattr(builtins, "wastes_nothing", False) else seconds)
    while time.perf_counter() < until:
        pass
