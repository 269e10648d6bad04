# tricky: One worker that stays, with batches of its own making.
# steps: 160
# device: cpu

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class JitteredBatches(Dataset):
    def __init__(self, batches, size):
        images = load_digits()
        self.images = (images.data / 16).astype(np.float32)
        self.labels = images.target
        self.batches, self.size = batches, size

    def __len__(self):
        return self.batches

    def __getitem__(self, number):
        rng = np.random.default_rng(number)
        rows = rng.integers(0, len(self.labels), self.size)
        noisy = self.images[rows] + 0.1 * rng.standard_normal((self.size, 64), dtype=np.float32)
        return torch.from_numpy(noisy), torch.from_numpy(self.labels[rows])


def main():
    torch.manual_seed(207)
    loader = DataLoader(JitteredBatches(40, 192), batch_size=None, shuffle=True, num_workers=1, persistent_workers=True)
    net = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        right = count = 0
        for x, y in loader:
            out = net(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right, count = right + (out.argmax(1) == y).sum().item(), count + len(y)
        print(f"epoch {epoch}: {right / count:.3f}")


if __name__ == "__main__":
    main()
