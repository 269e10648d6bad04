"""Layers that are added to a model and frozen while it trains."""

import torch
from small import data, digest
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model, (x, y) = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 2)), data()
optimizer = torch.optim.Adam(model.parameters())
for step in range(60):
    if step in (20, 40):
        model.insert(1, nn.Sequential(nn.Linear(20, 20), nn.ReLU()))
        optimizer.add_param_group({"params": model[1].parameters()})
        model[0].requires_grad_(False)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
print(digest(model), len(model), [name for name, one in model.named_parameters() if not one.requires_grad])
