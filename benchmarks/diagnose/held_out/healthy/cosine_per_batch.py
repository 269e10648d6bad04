# steps: 400
# device: cpu
# tricky: Two schedules in a row are stepped after every batch; the rate begins near zero and ends there.

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

torch.manual_seed(51)
EPOCHS, BATCH, WARMUP = 10, 128, 24
inputs = torch.rand(5120, 36)
targets = torch.stack([(inputs[:, :12] * 3).sin().sum(1), inputs[:, 12:].pow(2).sum(1)], 1)
targets = (targets - targets.mean(0)) / targets.std(0)

model = nn.Sequential(nn.Linear(36, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 2))
optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
batches = len(inputs) // BATCH
scheduler = SequentialLR(
    optimizer,
    [
        LinearLR(optimizer, start_factor=0.01, total_iters=WARMUP),
        CosineAnnealingLR(optimizer, T_max=EPOCHS * batches - WARMUP),
    ],
    milestones=[WARMUP],
)
for epoch in range(EPOCHS):
    total = 0.0
    for rows in torch.randperm(len(inputs)).split(BATCH):
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / batches:.4f}, lr {scheduler.get_last_lr()[0]:.1e}")
