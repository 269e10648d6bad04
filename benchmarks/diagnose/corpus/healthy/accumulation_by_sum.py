# tricky: Sums of losses over micro-batches, divided by the number of samples before the step.
# steps: 150
# device: cpu

import torch
from torch import nn

torch.manual_seed(103)
x = torch.randn(4096, 48)
y = x @ torch.randn(48, 2) / 7
model = nn.Sequential(nn.Linear(48, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(150):
    optimizer.zero_grad()
    samples, total = 0, 0.0
    for size in (40, 24, 56, 8):
        chosen = torch.randint(0, 4096, (size,))
        loss = nn.functional.mse_loss(model(x[chosen]), y[chosen], reduction="sum")
        loss.backward()
        samples, total = samples + size, total + loss.item()
    for parameter in model.parameters():
        parameter.grad /= samples
    optimizer.step()
    if step % 38 == 0:
        print(f"step {step}: loss {total / samples:.4f}")
