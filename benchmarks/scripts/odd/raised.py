"""An exception with a cause, out of a model."""

import torch
from small import net, train


class Broken(torch.nn.Module):
    def forward(self, x):
        try:
            return x @ x
        except RuntimeError as error:
            raise ValueError("shapes") from error


train(net(), 40)
torch.nn.Sequential(Broken())(torch.ones(2, 3))
