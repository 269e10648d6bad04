"""Averaged weights, parametrizations and spectral norm."""

import torch
from small import data, digest, net, train
from torch.optim.swa_utils import AveragedModel

model = net()
torch.nn.utils.parametrizations.spectral_norm(model[0])
torch.nn.utils.parametrizations.weight_norm(model[2])
average = AveragedModel(model)
for _ in range(12):
    train(model, 6)
    average.update_parameters(model)
print(digest(average), average(data()[0]).shape)
