# subject: recompilations
# thread: https://github.com/pytorch/pytorch/issues/107076
# steps: 240
# gain: yes
# device: cpu
# what: A schedule passes a Python number to a compiled function, which is compiled again for each value.

import torch
from torch import nn

torch.manual_seed(43)
x = torch.randn(1024, 64)
y = x @ torch.randn(64, 2)


def noisy(batch: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
    return batch + amount * torch.sin(batch)


compiled = torch.compile(noisy, backend="eager", dynamic=False)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(240):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(compiled(x[chosen], torch.tensor(0.1 / (1 + step)))), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
