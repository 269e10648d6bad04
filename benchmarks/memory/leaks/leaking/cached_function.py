"""A cache without an end on a function whose arguments never come again."""

import functools

import torch
from torch import nn


@functools.cache  # leak
def positions(step, width):
    angles = torch.arange(32 * width, dtype=torch.float32).reshape(32, width)
    return torch.sin(angles + step)


def main():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(200):
        loss = model(torch.randn(32, 16) + positions(step, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
