# subject: hidden-sync
# thread: https://github.com/pytorch/pytorch/issues/12461
# steps: 300
# gain: yes
# device: cuda
# what: Rows are picked by a boolean mask, whose size the host has to know.

import torch
from torch import nn

torch.manual_seed(203)
x = torch.randn(16384, 64, device="cuda")
y = (x[:, :8]).argmax(1)
valid = torch.rand(16384, device="cuda") < 0.7
blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(12)]
model = nn.Sequential(*blocks, nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(300):
    chosen = torch.randint(0, 16384, (256,), device="cuda")
    optimizer.zero_grad()
    logits = model(x[chosen])
    keep = valid[chosen]
    loss = nn.functional.cross_entropy(logits, torch.where(keep, y[chosen], -100))
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
