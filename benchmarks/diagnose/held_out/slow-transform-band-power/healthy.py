# subject: slow-transform
# also: starved-loader
# follows: per-sample-fetch
# thread: own
# steps: 180
# gain: yes
# device: cpu
# what: The band powers of a signal never change, but they are computed anew whenever a sample is fetched.

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def band_power(signal):
    window = np.hanning(128)
    frames = [signal[i : i + 128] * window for i in range(0, len(signal) - 127, 32)]
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    return np.log(power + 1e-6).astype(np.float32).ravel()


class Signals(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 5, count)
        time = np.arange(1024) / 1024
        tone = np.sin(2 * np.pi * (20 + 12 * self.labels[:, None]) * time)
        self.signals = tone + 4 * rng.standard_normal((count, 1024))
        self.features = [torch.from_numpy(band_power(signal)) for signal in self.signals]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.features[i], int(self.labels[i])


torch.manual_seed(42)
np.random.seed(42)
loader = DataLoader(Signals(3840, seed=42), batch_size=128, shuffle=True)
model = nn.Sequential(
    nn.Linear(29 * 65, 768), nn.BatchNorm1d(768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 5)
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(6):
    running, seen = 0.0, 0
    for features, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(features), labels)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(labels)
        seen += len(labels)
    print(f"epoch {epoch + 1}: train loss {running / seen:.4f}")
