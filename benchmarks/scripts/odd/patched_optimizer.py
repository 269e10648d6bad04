"""Optimizer.step replaced on the class, and torch.Tensor.backward beside it."""

import torch
from small import digest, net, train

steps = passes = 0
step, backward = torch.optim.SGD.step, torch.Tensor.backward


def counted_step(self, *args, **kwargs):
    global steps
    steps += 1
    return step(self, *args, **kwargs)


def counted_backward(self, *args, **kwargs):
    global passes
    passes += 1
    return backward(self, *args, **kwargs)


torch.optim.SGD.step, torch.Tensor.backward = counted_step, counted_backward
model = net()
train(model, 100, torch.optim.SGD(model.parameters(), 0.1))
print(steps, passes, digest(model), torch.optim.SGD.step is counted_step)
