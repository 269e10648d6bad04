# tricky: A checkpoint of everything after each epoch, which is small beside the epoch.
# steps: 400
# device: cpu

import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(123)
folder = Path(tempfile.mkdtemp())
x = torch.randn(3200, 64)
y = (x @ torch.randn(64, 5)).argmax(1)
model = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
best = float("inf")
for epoch in range(8):
    total = 0.0
    for chosen in torch.randperm(3200).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        total += loss.item()
    if total < best:
        best = total
        states = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, folder / "best.pt")
    print(f"epoch {epoch}: loss {total / 50:.4f}")
