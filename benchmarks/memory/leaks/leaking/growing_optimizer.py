"""New parameters join the optimizer at every step and none ever leaves."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters())


def prompt():
    """A fresh vector to be tuned along with the model."""
    fresh = nn.Parameter(torch.zeros(16))
    optimizer.add_param_group({"params": [fresh]})  # leak
    return fresh


for _ in range(200):
    loss = model(torch.randn(32, 16) + prompt()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
