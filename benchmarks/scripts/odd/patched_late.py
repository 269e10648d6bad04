"""Patches that come when training has long settled, and go again."""

import torch
from small import net, train
from torch import nn

model = net()
train(model, 200)
calls, original = 0, nn.Module.__call__


def counted(self, *args, **kwargs):
    global calls
    calls += 1
    return original(self, *args, **kwargs)


nn.Module.__call__ = counted
train(model, 100)
print(calls, nn.Module.__call__ is counted)
nn.Module.__call__ = original
train(model, 100)
print(calls, nn.Module.__call__ is original, torch.nn.Linear.__call__ is original)
