# tricky: A copy of the model is trained on each task by an optimizer of its own; the model itself has none.
# steps: 400
# device: cpu

import copy

import torch
from torch import nn


def task():
    amplitude, phase = 0.5 + 2 * torch.rand(1), 3.14 * torch.rand(1)
    x = 10 * torch.rand(128, 1) - 5
    return x, amplitude * torch.sin(x + phase)


torch.manual_seed(202)
model = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
for round_number in range(50):
    learner = copy.deepcopy(model)
    inner = torch.optim.SGD(learner.parameters(), lr=0.02)
    x, y = task()
    for _ in range(8):
        loss = nn.functional.mse_loss(learner(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
    with torch.no_grad():
        for slow, fast in zip(model.parameters(), learner.parameters(), strict=True):
            slow.lerp_(fast, 0.3)
    if round_number % 10 == 9:
        print(f"round {round_number + 1}: after adaptation {loss.item():.4f}")
