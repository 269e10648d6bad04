# tricky: The closure of LBFGS clears and computes gradients several times in one step.
# steps: 40
# device: cpu

import torch
from torch import nn

torch.manual_seed(111)
x = torch.randn(4096, 32)
y = (torch.sin(x[:, :8]).sum(1, keepdim=True)) / 3
model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, history_size=8)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(40):
    loss = optimizer.step(closure)
    if step % 8 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
