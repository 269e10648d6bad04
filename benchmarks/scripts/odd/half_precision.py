"""Autocast on the CPU with a scaler that does nothing there."""

import warnings

import torch
from small import data, digest, net
from torch.nn import functional as F

warnings.simplefilter("ignore")
model, (x, y) = net(), data()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", enabled=True)
for _ in range(50):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(digest(model), scaler.get_scale(), loss.dtype)
