# subject: exploding-gradients
# follows: loss-not-falling
# thread: https://github.com/pytorch/examples/pull/223
# steps: 400
# gain: no
# device: cpu
# what: A rate that is far too large: losses and gradients grow without bound.

import torch
from torch import nn

torch.manual_seed(73)
x = torch.randn(1024, 64)
y = x @ torch.randn(64, 1) + 3
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # <- here
for step in range(400):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
    loss.backward()  # <- here
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4g}")
