# subject: fp32-matmul
# thread: https://github.com/pytorch/pytorch/issues/153195
# steps: 60
# gain: yes
# device: cuda
# what: Large products in full float32, where TF32 would do.

import torch
from torch import nn

torch.manual_seed(207)
x = torch.randn(8192, 4096, device="cuda")
y = x[:, :8].argmax(1)
model = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096), nn.GELU(), nn.Linear(4096, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(60):
    chosen = torch.randint(0, 8192, (4096,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])  # <- here
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
