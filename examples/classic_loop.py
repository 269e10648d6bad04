"""The training loop that every tutorial begins with: a two-layer perceptron on data that is already in memory.

python classic_loop.py --epochs 5
"""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(samples, seed):
    """Ten overlapping clusters in 30 dimensions, seen through a fixed random projection to 784."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(10, 30, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    points = centres[labels] + 2.0 * torch.randn(samples, 30, generator=generator)
    projection = torch.randn(30, 784, generator=generator) / 30**0.5
    return points @ projection, labels


def train(model, loader, optimizer, criterion, device):
    model.train()
    total_loss = 0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(loader)


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    correct = 0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        correct += model(data).argmax(dim=1).eq(target).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--samples", type=int, default=50_000, help="training and test samples together")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"Using device: {device}")

    inputs, labels = make_data(args.samples, args.seed)
    split = args.samples * 4 // 5
    train_loader = DataLoader(TensorDataset(inputs[:split], labels[:split]), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(inputs[split:], labels[split:]), batch_size=1000)

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, args.epochs + 1):
        loss = train(model, train_loader, optimizer, criterion, device)
        accuracy = test(model, test_loader, device)
        print(f"Epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
