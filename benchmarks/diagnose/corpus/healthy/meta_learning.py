# tricky: An inner loop of updates made by hand with create_graph, under an outer optimizer.
# steps: 150
# device: cpu

import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(119)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
outer = torch.optim.Adam(model.parameters(), lr=2e-3)


def task() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(32, 1) * 6 - 3
    return x, (0.5 + torch.rand(1)) * torch.sin(x + torch.rand(1))


for step in range(150):
    outer.zero_grad()
    total = 0.0
    for _ in range(4):
        x, y = task()
        weights = dict(model.named_parameters())
        inner = nn.functional.mse_loss(functional_call(model, weights, x[:16]), y[:16])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.05 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        loss = nn.functional.mse_loss(functional_call(model, adapted, x[16:]), y[16:]) / 4
        loss.backward()
        total += loss.item()
    outer.step()
    if step % 38 == 0:
        print(f"step {step}: loss {total:.4f}")
