"""Models, optimizers, loaders, iterators, batches and losses die when the script lets go of them."""

import gc
import weakref

import torch
from small import data, net
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def fold(steps):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(*data(16 * steps)), batch_size=16)
    iterator = iter(loader)
    for x, y in iterator:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weakref.ref(one) for one in (model, optimizer, loader, iterator, x, loss, model[0].weight)]


for steps in (1, 2, 12, 21, 22, 45, 90):
    held = fold(steps)
    print(steps, [one() is None for one in held])
    gc.collect()
    print(steps, [one() is None for one in held])


def one_pass():
    model = net()
    model(torch.ones(2, 20)).sum().backward()
    return [weakref.ref(model), weakref.ref(model[0].weight)]


print([one() is None for one in one_pass()])
