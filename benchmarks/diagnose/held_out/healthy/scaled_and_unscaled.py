# tricky: float16 autocast with a scaler; gradients are unscaled, measured and clipped before the step.
# steps: 200
# device: cpu

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(218)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(200):
    rows = torch.randint(0, len(labels), (128,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 50 == 49:
        print(f"step {step + 1}: {loss.item():.4f}, norm {norm.item():.3f}, scale {scaler.get_scale():.0f}")
