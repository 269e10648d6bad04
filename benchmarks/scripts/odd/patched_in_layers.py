"""Two patches over one another, with functools.wraps, taken off in the other order."""

import functools

import torch
from small import net, train

log = []


def noting(name, function):
    @functools.wraps(function)
    def noted(*args, **kwargs):
        log.append(name)
        return function(*args, **kwargs)

    return noted


first = torch.autograd.backward
torch.autograd.backward = noting("inner", first)
inner = torch.autograd.backward
torch.autograd.backward = noting("outer", inner)
train(net(), 120)
print(log.count("inner"), log.count("outer"))
torch.autograd.backward = inner
train(net(), 30)
torch.autograd.backward = first
train(net(), 30)
print(log.count("inner"), log.count("outer"), torch.autograd.backward is first, torch.autograd.backward.__name__)
