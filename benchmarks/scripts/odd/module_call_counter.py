"""A counter around every module call and every backward pass, put on and taken off as profilers do it."""

import torch
from small import net, train
from torch import nn

calls = passes = 0
original_call, original_backward = nn.Module.__call__, torch.autograd.backward


def counted(self, *args, **kwargs):
    global calls
    calls += 1
    return original_call(self, *args, **kwargs)


def backward(*args, **kwargs):
    global passes
    passes += 1
    return original_backward(*args, **kwargs)


nn.Module.__call__, torch.autograd.backward = counted, backward
train(net(), 400)
print(calls, passes, nn.Module.__call__ is counted, torch.autograd.backward is backward)
nn.Module.__call__, torch.autograd.backward = original_call, original_backward
train(net(), 100)
print(calls, passes, nn.Module.__call__ is original_call, torch.autograd.backward is original_backward)
