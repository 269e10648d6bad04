"""Convolutions with batch norm: strides and flat views of the weights at the end."""

import torch
from small import digest
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
images, labels = torch.randn(32, 3, 16, 16), torch.randint(0, 4, (32,))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model.append(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for step in range(60):
    rows = slice(step * 8 % 32, step * 8 % 32 + 8)
    optimizer.zero_grad()
    F.cross_entropy(model(images[rows]), labels[rows]).backward()
    optimizer.step()
print(digest(model), torch.cat([one.data.view(-1) for one in model.parameters()]).norm().item().hex())
print(model[0].weight.stride())
