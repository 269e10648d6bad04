"""Names taken from torch at the start are still what torch has at the end."""

import inspect
import pickle

import torch
from small import net, train
from torch.autograd import backward, grad
from torch.nn import Module

call = Module.__call__
train(net(), 120)
print(torch.autograd.grad is grad, torch.autograd.backward is backward, Module.__call__ is call)
print(inspect.signature(grad), inspect.signature(backward))
print(grad.__name__, grad.__qualname__, grad.__module__, bool(grad.__doc__))
print(pickle.loads(pickle.dumps(grad)) is grad)
x = torch.ones(3, requires_grad=True)
print(grad(x.pow(2).sum(), x)[0].tolist())
