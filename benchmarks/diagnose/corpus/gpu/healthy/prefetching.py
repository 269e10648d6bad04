# tricky: Copies from pinned memory without waiting, and one number taken to the host in 100 steps.
# steps: 300
# device: cuda

import torch
from torch import nn

torch.manual_seed(220)
x = torch.randn(16384, 256).pin_memory()
y = x[:, :10].argmax(1).pin_memory()
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
model = nn.Sequential(*blocks, nn.Linear(256, 10)).cuda()
torch.set_float32_matmul_precision("high")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
for step in range(300):
    start = step % 16 * 1024
    batch = x[start : start + 1024].cuda(non_blocking=True)
    wanted = y[start : start + 1024].cuda(non_blocking=True)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), wanted)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
