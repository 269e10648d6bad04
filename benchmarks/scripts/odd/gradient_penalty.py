"""Gradients of gradients, from the thirtieth step on, and a Hessian product after training."""

import torch
from small import data, digest, net
from torch.nn import functional as F

model, (x, y) = net(), data()
optimizer = torch.optim.Adam(model.parameters())
for step in range(60):
    x.requires_grad_(step >= 30)
    loss = F.cross_entropy(model(x), y)
    if step >= 30:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = list(model.parameters())
slopes = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
product = torch.autograd.grad(sum((slope * slope.detach()).sum() for slope in slopes), weights)
print(digest(model), sum(one.double().sum() for one in product).item().hex())
