# subject: hidden-sync
# also: logging-time
# thread: own
# steps: 200
# gain: yes
# device: cuda
# what: Every step prints a tensor that lies on the GPU.

import torch
from torch import nn

torch.manual_seed(216)
x = torch.randn(4096, 256, device="cuda")
y = x[:, :10].argmax(1)
blocks = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(16)]
model = nn.Sequential(*blocks, nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(200):
    chosen = torch.randint(0, 4096, (512,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    print(step, loss.detach())  # <- here
