"""A queue that was meant to be short, without maxlen."""

from collections import deque

import torch
from torch import nn

RECENT = deque()


def remember(loss, gradients):
    RECENT.append({"loss": loss.item(), "gradients": gradients})  # leak


def train(steps):
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        loss = model(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        remember(loss, [parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()


torch.manual_seed(0)
train(200)
