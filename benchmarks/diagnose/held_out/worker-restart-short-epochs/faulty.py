# subject: worker-restart
# also: starved-loader
# thread: https://github.com/metatensor/metatrain/pull/1271
# steps: 240
# gain: yes
# device: cpu
# what: Epochs of eight batches, and the worker processes of the loader are forked anew for each.

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class NoisyDigits(Dataset):
    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        self.images = (images / 16).astype(np.float32)
        self.labels = labels

    def __len__(self):
        return 1024

    def __getitem__(self, i):
        shifted = np.roll(self.images[i].reshape(8, 8), i % 3 - 1, axis=1)
        return torch.from_numpy(shifted.reshape(64).copy()), int(self.labels[i])


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x))


def train(args):
    torch.manual_seed(args.seed)
    loader = DataLoader(NoisyDigits(), 128, shuffle=True, num_workers=2)  # <- here
    net = Net(args.width)
    optim = torch.optim.Adam(net.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        losses = []
        for x, y in loader:  # <- here
            optim.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optim.step()
            losses.append(loss.item())
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: {np.mean(losses):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())
