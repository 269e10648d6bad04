"""A closure keeps a list that nothing outside can name."""

import torch
from torch import nn


def make_recorder(every):
    seen = []
    count = 0

    def record(value):
        nonlocal count
        count += 1
        if count % every == 0:
            seen.append((count, value))  # leak
        return len(seen)

    return record


def train():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    record = make_recorder(every=1)
    for _ in range(200):
        predicted = model(torch.randn(32, 16))
        loss = predicted.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(predicted)


train()
