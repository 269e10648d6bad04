# subject: graph-breaks
# also: logging-time
# thread: https://github.com/vipshop/cache-dit/issues/76
# steps: 400
# gain: yes
# device: cpu
# what: A leftover print of a tensor in a compiled forward pass.

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(x))
        print("hidden mean", hidden.mean())  # <- here
        return self.second(hidden)


torch.manual_seed(45)
x = torch.randn(1024, 96)
y = torch.tanh(x[:, :8] + x[:, 8:16])
model = Encoder()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(400):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(compiled(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
