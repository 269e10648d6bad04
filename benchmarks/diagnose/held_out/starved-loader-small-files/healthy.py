# subject: starved-loader
# also: slow-transform, disk-time, per-sample-fetch
# thread: own
# steps: 160
# gain: yes
# device: cpu
# what: Every sample is a small file on slow storage (a read waits), and the main process reads them one by one.

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LATENCY = 0.00012  # seconds until the network share answers


def write_samples(folder, count):
    rng = np.random.default_rng(4)
    classes = rng.standard_normal((8, 256)).astype(np.float32)
    for number in range(count):
        label = int(rng.integers(0, 8))
        row = classes[label] + 8 * rng.standard_normal(256).astype(np.float32)
        (folder / f"{number:05d}_{label}.bin").write_bytes(row.tobytes())


class FileDataset(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.bin"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path = self.files[index]
        time.sleep(LATENCY)
        row = np.frombuffer(path.read_bytes(), dtype=np.float32).copy()
        return torch.from_numpy(row), int(path.stem.split("_")[1])


def main():
    torch.manual_seed(4)
    with tempfile.TemporaryDirectory() as name:
        write_samples(Path(name), 5120)
        loader = DataLoader(
            FileDataset(Path(name)), batch_size=128, shuffle=True, num_workers=2, persistent_workers=True
        )
        model = nn.Sequential(
            nn.Linear(256, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 8),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
        for epoch in range(4):
            total = 0.0
            for rows, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(rows), labels)
                loss.backward()
                optimizer.step()
                total += loss.item()
            print(f"epoch {epoch}: {total / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
