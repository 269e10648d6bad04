# tricky: Numbers are taken out of tensors and printed, but only every 50 steps.
# steps: 500
# device: cpu

import logging
import sys

import torch
from torch import nn

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
torch.manual_seed(109)
x = torch.randn(4096, 64)
y = (x @ torch.randn(64, 9)).argmax(1)
model = nn.Sequential(nn.Linear(64, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=500)
seen = torch.zeros(())
for step in range(500):
    chosen = torch.randint(0, 4096, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    scheduler.step()
    seen += loss.detach()
    if step % 50 == 49:
        logging.info("step %d: loss %.4f, rate %.2e", step + 1, seen.item() / 50, scheduler.get_last_lr()[0])
        seen.zero_()
