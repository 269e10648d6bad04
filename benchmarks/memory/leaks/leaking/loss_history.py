"""A meter keeps losses with their graphs; a second term is never passed to backward."""

import torch
from torch import nn


class Meter:
    """The mean of what it is given."""

    def __init__(self):
        self.history = []

    def update(self, value):
        self.history.append(value)  # leak

    def mean(self):
        return sum(float(value) for value in self.history) / len(self.history)


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.meter = Meter()

    def step(self, inputs, targets):
        predicted = self.model(inputs)
        entropy = -(predicted.softmax(-1) * predicted.log_softmax(-1)).sum(-1).mean()
        loss = nn.functional.cross_entropy(predicted, targets)
        self.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        self.optimizer.step()
        self.meter.update(entropy)


torch.manual_seed(0)
trainer = Trainer()
for _ in range(200):
    trainer.step(torch.randn(32, 16), torch.randint(0, 4, (32,)))
print(trainer.meter.mean())
