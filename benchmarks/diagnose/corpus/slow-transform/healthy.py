# subject: slow-transform
# also: starved-loader, python-time
# thread: https://github.com/MrGiovanni/ModelsGenesis/issues/24
# steps: 80
# gain: yes
# device: cpu
# what: An augmentation walks over the pixels in Python.

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def brighten(image: np.ndarray, amount: float) -> np.ndarray:
    return np.clip(image + np.float32(amount), 0.0, 1.0)


class Patches(Dataset):
    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.patches = rng.random((320, 32, 32), dtype=np.float32)
        self.labels = rng.integers(0, 2, 320)
        self.patches[self.labels == 1, :16] *= 0.6

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        patch = brighten(self.patches[index], 0.01 * (index % 7))
        return torch.from_numpy(patch).unsqueeze(0), int(self.labels[index])


torch.manual_seed(36)
loader = DataLoader(Patches(), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
model.append(nn.Linear(16 * 28 * 28, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(4):
    for patches, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(patches), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
