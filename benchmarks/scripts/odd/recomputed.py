"""Activation checkpointing of both kinds, with dropout."""

import torch
from small import data, digest
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
first, second = nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.3)), nn.Sequential(nn.GELU(), nn.Linear(32, 2))
model, (x, y) = nn.ModuleList([first, second]), data()
optimizer = torch.optim.Adam(model.parameters())
for step in range(50):
    hidden = checkpoint(first, x.requires_grad_(), use_reentrant=step % 2 == 0)
    loss = F.cross_entropy(checkpoint(second, hidden, use_reentrant=False), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(digest(model), torch.get_rng_state().sum().item())
