# subject: scheduler-order
# thread: https://github.com/zju3dv/NeuralRecon/issues/51
# steps: 500
# gain: no
# device: cpu
# what: The scheduler is stepped before the optimizer, so that the first rate of the schedule is skipped.

import torch
from torch import nn

torch.manual_seed(2)
inputs = torch.randn(2048, 80)
targets = torch.tanh(inputs @ torch.randn(80, 4) / 9)
model = nn.Sequential(nn.Linear(80, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)

for step in range(500):
    chosen = torch.randint(len(inputs), (64,))
    scheduler.step()  # <- here
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
    loss.backward()
    optimizer.step()
    if step % 125 == 0:
        print(f"step {step}: loss {loss.item():.4f}, rate {scheduler.get_last_lr()[0]:.2e}")
