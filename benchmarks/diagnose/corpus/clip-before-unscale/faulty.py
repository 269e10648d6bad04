# subject: clip-before-unscale
# follows: loss-not-falling
# thread: https://github.com/Lightning-AI/pytorch-lightning/issues/9330
# steps: 600
# gain: no
# device: cpu
# what: The norm of scaled gradients is clipped; unscaling then makes them far too small.

import torch
from torch import nn

torch.manual_seed(6)
inputs = torch.randn(2048, 128)
targets = (inputs @ torch.randn(128, 8)).argmax(dim=1)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for step in range(600):
    chosen = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(inputs[chosen])
    loss = nn.functional.cross_entropy(logits.float(), targets[chosen])
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- here
    scaler.step(optimizer)
    scaler.update()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
