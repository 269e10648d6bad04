# subject: disk-time
# also: starved-loader, slow-transform
# thread: https://github.com/pytorch/pytorch/issues/18096
# steps: 150
# gain: yes
# device: cpu
# what: A dataset of one file opens and reads it for every batch.

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(67)
rng = np.random.default_rng(4)
path = Path(tempfile.mkdtemp()) / "features.npz"
features = rng.standard_normal((4096, 128)).astype(np.float32)
np.savez_compressed(path, features=features, labels=features[:, :5].argmax(1))
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
stored = np.load(path)
features, labels = stored["features"], stored["labels"]
for step in range(150):
    chosen = rng.integers(0, 4096, 64)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.from_numpy(features[chosen])), torch.from_numpy(labels[chosen]))
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
