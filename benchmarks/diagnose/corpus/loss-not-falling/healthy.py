# subject: loss-not-falling
# thread: https://github.com/mlcommons/GaNDLF/pull/870
# steps: 800
# gain: no
# device: cpu
# what: Inputs and labels are shuffled apart from each other: there is nothing to learn.

import torch
from torch import nn

torch.manual_seed(69)
x = torch.randn(8192, 32)
y = (x @ torch.randn(32, 4)).argmax(1)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(800):
    chosen = torch.randint(0, 8192, (128,))
    inputs, labels = x[chosen], y[chosen]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
