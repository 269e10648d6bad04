"""A training script that takes turns with another one, window by window: see `processes`.

python loop.py KIND WINDOWS STEPS READ WRITE OUT: waits for a byte on READ, runs STEPS steps, passes a byte on to WRITE.
"""

import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind, windows, steps, read, write, out = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
torch.set_num_threads(1)
torch.manual_seed(0)
if kind == "tiny":
    model, data, batch = nn.Linear(8, 4), torch.randn(4096, 8), 16
elif kind == "small":
    model, data, batch = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(8192, 64), 128
elif kind == "mlp":
    model, data, batch = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(8192, 784), 64
else:
    blocks = [nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128)) for _ in range(12)]
    model, data, batch = nn.Sequential(*blocks, nn.Linear(128, 10)), torch.randn(8192, 128), 64
loader = DataLoader(TensorDataset(data, torch.randint(0, 4, (len(data),))), batch_size=batch, shuffle=True)
optimizer = torch.optim.Adam(model.parameters())
seconds = []


def forever():
    while True:
        yield from loader


def step():
    inputs, targets = next(batches)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()


batches = forever()
for _ in range(windows):
    os.read(read, 1)
    began = time.thread_time()
    for _ in range(steps):
        step()
    seconds.append((time.thread_time() - began) / steps)
    os.write(write, b".")
with open(out, "w") as file:
    json.dump(seconds, file)
