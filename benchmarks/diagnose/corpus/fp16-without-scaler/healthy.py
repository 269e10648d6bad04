# subject: fp16-without-scaler
# follows: loss-not-falling
# thread: https://github.com/engichang1467/Open-Rig3R/issues/35
# steps: 600
# gain: no
# device: cpu
# what: float16 autocast without loss scaling: small gradients become zero unnoticed.

import torch
from torch import nn

torch.manual_seed(8)
inputs = torch.randn(2048, 96)
targets = torch.sin(inputs[:, :6] * 2)
model = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

for step in range(600):
    chosen = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(inputs[chosen])
        loss = nn.functional.mse_loss(predicted.float(), targets[chosen])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
