# tricky: float16 with loss scaling, clipping in the right place, and a step that the scaler may skip.
# steps: 400
# device: cpu

import torch
from torch import nn

torch.manual_seed(116)
x = torch.randn(1024, 128)
y = (x @ torch.randn(128, 6)).argmax(1)
model = nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(400):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[chosen])
    loss = nn.functional.cross_entropy(logits.float(), y[chosen])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
