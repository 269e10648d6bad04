# subject: slow-transform
# also: starved-loader, python-time, per-sample-fetch
# thread: https://github.com/pytorch/pytorch/issues/13918
# steps: 80
# gain: yes
# device: cpu
# what: A collate function hands a list of arrays to torch.tensor, which walks over every number.

import warnings

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", message="Creating a tensor from a list of numpy.ndarrays")


def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    frames = torch.tensor([frame for frame, _ in samples])  # <- here
    return frames, torch.tensor([label for _, label in samples])


rng = np.random.default_rng(3)
torch.manual_seed(37)
frames = rng.standard_normal((320, 4, 40, 40)).astype(np.float32)
labels = (frames[:, 0].mean((1, 2)) > 0).astype(int).tolist()
loader = DataLoader(list(zip(frames, labels, strict=True)), batch_size=16, shuffle=True, collate_fn=collate)
model = nn.Sequential(nn.Conv2d(4, 16, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 18 * 18, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
