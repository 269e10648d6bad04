"""Gradient accumulation and clipping with a schedule, and evaluations that forget no_grad."""

import torch
from small import data, digest, net
from torch.nn import functional as F

model, (x, y) = net(), data()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for step in range(40):
    for part in range(4):
        (F.cross_entropy(model(x[part::4]), y[part::4]) / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(F.cross_entropy(model(x), y).item().hex(), schedule.get_last_lr())
print(digest(model))
