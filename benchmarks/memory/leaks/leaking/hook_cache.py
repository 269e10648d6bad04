"""A forward hook, a method of an object, keeps what it sees."""

import torch
from torch import nn


class FeatureStore:
    """Collects what a layer puts out."""

    def __init__(self, layer):
        self.features = []
        layer.register_forward_hook(self.keep)

    def keep(self, layer, inputs, output):
        self.features.append(output.detach())  # leak


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    store = FeatureStore(model[0])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(200):
        loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(0, 4, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(len(store.features))


main()
