"""A script that follows torch's operations itself, while it trains with and without an optimizer."""

from collections import Counter

import torch
from small import data, net, train
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


with Seen() as seen:
    model, (x, y) = net(), data()
    for _ in range(12):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
                one.grad = None
print(sorted(seen.counts.items()))
with Seen() as seen:
    train(net(), 60)
print(sorted(seen.counts.items()))
