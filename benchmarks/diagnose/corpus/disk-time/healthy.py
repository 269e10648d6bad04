# subject: disk-time
# thread: https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/173
# steps: 50
# gain: yes
# device: cpu
# what: A checkpoint is written after every batch.

import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(66)
folder = Path(tempfile.mkdtemp())
x = torch.randn(1024, 256)
y = (x @ torch.randn(256, 20)).argmax(1)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(50):
    chosen = torch.randint(0, 1024, (32,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
torch.save({"step": step, "model": model.state_dict()}, folder / "last.pt")
print(f"last loss {loss.item():.4f}")
