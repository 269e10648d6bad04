# subject: vanishing-gradients
# follows: loss-not-falling
# thread: https://github.com/SilasMarvin/dnns-from-scratch-in-zig/pull/7
# steps: 400
# gain: no
# device: cpu
# what: Fourteen sigmoid layers: nothing of the gradient reaches the first.

import torch
from torch import nn

torch.manual_seed(71)
x = torch.randn(2048, 32)
y = (x @ torch.randn(32, 3)).argmax(1)
hidden: list[nn.Module] = []
for _ in range(14):
    hidden += [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
model = nn.Sequential(nn.Linear(32, 64), *hidden, nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(400):
    chosen = torch.randint(0, 2048, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 133 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
