# subject: tiny-batch
# thread: https://github.com/wangkaihong/Unsup_Recycle_GAN/issues/11
# steps: 4000
# gain: yes
# device: cpu
# what: Batches of one sample: the time goes into calling operators, not into numbers.

import torch
from torch import nn

torch.manual_seed(41)
BATCH = 50
x = torch.randn(4000, 32)
y = torch.sin(x[:, 0]) + x[:, 1]
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for start in range(0, 4000, BATCH):
    loss = nn.functional.mse_loss(model(x[start : start + BATCH]).squeeze(1), y[start : start + BATCH])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if start % 1000 == 0:
        print(f"sample {start}: loss {loss.item():.4f}")
