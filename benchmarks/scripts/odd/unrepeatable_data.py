"""An iterable data set with a state, a loader subclass, and a sampler that shuffles."""

import random

import torch
from small import data, digest, net
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        for _ in range(64):
            self.drawn += 1
            yield random.random() + torch.zeros(20), random.randrange(2)


class Loader(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch


random.seed(0)
stream, model = Stream(), net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    for x, y in Loader(stream, batch_size=8):
        optimizer.zero_grad()
        F.cross_entropy(model(x.float()), y).backward()
        optimizer.step()
for x, y in DataLoader(list(zip(*data(), strict=True)), batch_size=32, shuffle=True):
    print(x.sum().item().hex())
print(digest(model), stream.drawn, random.random())
