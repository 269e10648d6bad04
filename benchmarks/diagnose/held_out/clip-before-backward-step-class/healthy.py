# subject: clip-before-backward
# thread: own
# steps: 440
# gain: no
# device: cpu
# what: Gradients are clipped while there are none: the backward pass comes afterwards.

import torch
from torch import nn


class Step:
    """One optimization step; rare outliers in the targets make clipping needed."""

    def __init__(self, model, lr, limit):
        self.model = model
        self.limit = limit
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.criterion = nn.MSELoss()

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.optimizer.step()
        return loss.item()


def data(n):
    x = torch.randn(n, 80)
    y = x[:, :8].sum(1, keepdim=True).sin()
    outliers = torch.rand(n, 1) < 0.01
    return x, torch.where(outliers, y * 6, y)


torch.manual_seed(77)
x, y = data(5120)
model = nn.Sequential(nn.Linear(80, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
step = Step(model, lr=0.01, limit=0.5)
for epoch in range(11):
    losses = [step(x[idx], y[idx]) for idx in torch.randperm(len(x)).split(128)]
    print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")
