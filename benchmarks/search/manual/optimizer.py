"""A deep model of small layers. By hand: AdamW(fused=True)."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn

layers = [layer for _ in range(24) for layer in (nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(96, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=BY_HAND or None)
x, y = torch.randn(64, 96), torch.randint(0, 10, (64,))

begin()
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step_ended():
        break
