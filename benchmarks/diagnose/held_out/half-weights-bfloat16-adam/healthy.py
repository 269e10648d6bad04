# subject: half-weights
# follows: loss-not-falling
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: The model itself is bfloat16, and steps of a small rate are lost in rounding.

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(61)
pixels, labels = load_digits(return_X_y=True)
pixels = torch.tensor(pixels / 16, dtype=torch.float32)
labels = torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for epoch in range(30):
    total = 0.0
    for rows in torch.randperm(len(labels))[:1280].split(128):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(pixels[rows])
        loss = nn.functional.cross_entropy(out.float(), labels[rows])
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 6 == 5:
        print(f"epoch {epoch + 1}: {total / 10:.4f}")
