"""Data in memory. By hand: slices of a random order in place of a DataLoader, and a fused optimizer."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
images, labels = torch.randn(1797, 64), torch.randint(0, 10, (1797,))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=BY_HAND or None)
loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)


def batches():
    if not BY_HAND:
        yield from loader
        return
    for rows in torch.randperm(len(images)).split(BATCH):
        yield images[rows], labels[rows]


begin()
over = False
while not over:
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if over := step_ended():
            break
