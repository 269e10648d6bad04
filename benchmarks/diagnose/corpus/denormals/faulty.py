# subject: denormals
# thread: https://github.com/pytorch/pytorch/issues/21734
# steps: 60
# gain: yes
# device: cpu
# what: Weights have decayed below the smallest normal number, where arithmetic is many times slower.

import torch
from torch import nn

torch.manual_seed(48)
x = torch.randn(512, 256)
y = x[:, :4].argmax(1)
old = nn.Linear(256, 256, bias=False)
with torch.no_grad():
    old.weight.mul_(1e-39)  # <- here
new = nn.Linear(256, 4)
optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
for step in range(60):
    chosen = torch.randint(0, 512, (128,))
    with torch.no_grad():
        faded = old(x[chosen]).mul(0.5).cumsum(1).mean(1, keepdim=True)  # <- here
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(new(x[chosen]) + faded, y[chosen])
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
