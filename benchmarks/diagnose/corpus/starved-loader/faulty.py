# subject: starved-loader
# also: slow-transform
# thread: https://github.com/huggingface/transformers/issues/34059
# steps: 80
# gain: yes
# device: cpu
# what: Every sample is decompressed in the main process, while the model waits.

import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class CompressedImages(Dataset):
    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 10, count)
        stored = [(rng.random((3, 64, 64)) * 60 + 20 * label).astype(np.uint8) for label in self.labels]
        self.stored = [zlib.compress(image.tobytes(), 6) for image in stored]

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raw = zlib.decompress(self.stored[index])  # <- here
        image = np.frombuffer(raw, np.uint8).reshape(3, 64, 64).astype(np.float64)
        spectrum = np.fft.rfft2(image)  # <- here
        spectrum[:, 20:-20] = 0
        return torch.from_numpy(np.fft.irfft2(spectrum).astype(np.float32) / 255), int(self.labels[index])


if __name__ == "__main__":
    torch.manual_seed(30)
    torch.set_num_threads(1)
    loader = DataLoader(CompressedImages(640), batch_size=32, shuffle=True)  # <- here
    model = nn.Sequential(nn.Conv2d(3, 12, 5, stride=2), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2), nn.ReLU())
    model.extend([nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(24 * 16, 10)])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(4):
        for images, labels in loader:  # <- here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
