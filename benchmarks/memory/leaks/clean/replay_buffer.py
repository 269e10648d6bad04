"""A replay buffer that gives up its oldest entry once it is full."""

import random

import torch
from torch import nn


class Replay:
    def __init__(self, capacity):
        self.capacity, self.entries = capacity, []

    def add(self, entry):
        self.entries.append(entry)
        if len(self.entries) > self.capacity:
            self.entries.pop(0)

    def sample(self, count):
        return torch.stack(random.choices(self.entries, k=count))


def main():
    torch.manual_seed(0)
    replay, model = Replay(100), nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(200):
        replay.add(torch.randn(16))
        loss = model(replay.sample(32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
