"""The running loss is a tensor, so each step's graph hangs on the last one's."""

import torch
from torch import nn


def train_epoch(model, optimizer, batches):
    total = 0
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss  # leak
    return total / len(batches)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [(torch.randn(32, 16), torch.randint(0, 4, (32,))) for _ in range(100)]
    for _ in range(3):
        mean = train_epoch(model, optimizer, batches)
        print(float(mean))


if __name__ == "__main__":
    main()
