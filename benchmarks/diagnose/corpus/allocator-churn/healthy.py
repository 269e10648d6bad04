# subject: allocator-churn
# thread: own
# steps: 200
# gain: yes
# device: cpu
# what: A buffer of 16 MB is allocated, filled and freed in every step.

import torch
from torch import nn

torch.manual_seed(57)
x = torch.randn(2048, 32)
y = torch.randint(0, 4, (2048,))
x += 2 * nn.functional.one_hot(y, 32)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
histogram = torch.zeros(4 * 1024 * 1024)
for step in range(200):
    chosen = torch.randint(0, 2048, (128,))
    optimizer.zero_grad()
    logits = model(x[chosen])
    histogram[: logits.numel()] += logits.detach().flatten()
    loss = nn.functional.cross_entropy(logits, y[chosen])
    loss.backward()
    optimizer.step()
    histogram[: logits.numel()].zero_()
    if step % 67 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
