# subject: hidden-sync
# thread: https://github.com/rdevon/cortex/issues/199
# steps: 400
# gain: yes
# device: cuda
# what: The loss and the accuracy of every step are taken to the host, which then has nothing queued.

import torch
from torch import nn

torch.manual_seed(201)
x = torch.randn(8192, 256, device="cuda")
y = (x @ torch.randn(256, 10, device="cuda")).argmax(1)
blocks = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(12)]
model = nn.Sequential(*blocks, nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
total, right = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
for step in range(400):
    chosen = torch.randint(0, 8192, (1024,), device="cuda")
    optimizer.zero_grad()
    logits = model(x[chosen])
    loss = nn.functional.cross_entropy(logits, y[chosen])
    total += loss.detach()
    right += (logits.argmax(1) == y[chosen]).float().mean()
    loss.backward()
    optimizer.step()
print(f"loss {float(total) / 400:.4f}, accuracy {float(right) / 400:.1%}")
