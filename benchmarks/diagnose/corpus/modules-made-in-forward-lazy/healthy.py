# subject: modules-made-in-forward
# also: parameters-not-in-optimizer
# thread: https://github.com/pytorch/pytorch/issues/1291
# steps: 300
# gain: yes
# device: cpu
# what: A model that makes its hidden layer where it is used; only the last one is trained.

import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(100, 200)
        self.last = nn.Linear(200, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(x).clamp(min=0))


torch.manual_seed(20)
x = torch.randn(1024, 100)
y = torch.stack([x[:, :50].mean(1), x[:, 50:].mean(1)], dim=1) * 5
model = Regressor()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(300):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
