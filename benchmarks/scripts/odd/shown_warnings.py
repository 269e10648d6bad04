"""Warnings with the lines that they are blamed on."""

import warnings

import torch
from small import net, train
from torch import nn


class Old(nn.Module):
    def forward(self, x):
        warnings.warn("from the forward", stacklevel=2)
        return nn.Softmax()(x)


model = Old()
for _ in range(2):
    model(torch.ones(2, 3))
train(net(), 40)
schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net().parameters(), 0.1), 1)
schedule.step()
warnings.warn("from the script", UserWarning)
