# steps: 288
# device: cpu
# tricky: Gradients of four micro-batches add up before a step, each divided by four.

import torch
from torch import nn

ACCUMULATE = 4
torch.manual_seed(19)
x = torch.randn(12288, 60)
y = torch.stack([x[:, :5].sum(1).cos(), x[:, 5] * x[:, 6]], 1)
model = nn.Sequential(nn.Linear(60, 640), nn.SiLU(), nn.Linear(640, 640), nn.SiLU(), nn.Linear(640, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
for epoch in range(12):
    total = 0.0
    optimizer.zero_grad()
    for i, rows in enumerate(torch.randperm(len(x)).split(128)):
        loss = nn.functional.mse_loss(model(x[rows]), y[rows]) / ACCUMULATE
        loss.backward()
        total += loss.item() * ACCUMULATE
        if (i + 1) % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: mse {total / 96:.4f}")
