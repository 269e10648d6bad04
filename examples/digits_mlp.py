"""Train a small MLP to read the handwritten digits that ship with scikit-learn.

Every training image is also shown shifted by one pixel in each direction, so that the network learns
not to depend on the exact position.

    python digits_mlp.py --epochs 20
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="MLP on scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=350)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--samples", type=int, default=0, help="use only the first N training images (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def shifted_copies(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The images themselves and their eight neighbours, each shifted by one pixel."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    copies = [padded[:, row : row + 8, column : column + 8] for row in range(3) for column in range(3)]
    return np.concatenate(copies), np.tile(labels, len(copies))


def load_data(samples: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=seed, stratify=digits.target
    )
    train_x, train_y = shifted_copies(train_x, train_y)
    if samples:
        train_x, train_y = train_x[:samples], train_y[:samples]
    train_set = TensorDataset(torch.from_numpy(train_x.reshape(-1, 64)), torch.from_numpy(train_y))
    test_set = TensorDataset(torch.from_numpy(test_x.reshape(-1, 64)), torch.from_numpy(test_y))
    return train_set, test_set


def train_epoch(model, loader, optimizer, criterion, device):
    model.train()
    total_loss = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(labels)
    return total_loss / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(loader.dataset)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, test_set = load_data(args.samples, args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=256)

    model = nn.Sequential(
        nn.Linear(64, args.hidden),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(args.hidden, 10),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    print(f"{len(train_set)} training images, {len(test_set)} test images, on {device}")
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, train_loader, optimizer, criterion, device)
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch:3d}  loss {loss:.4f}  test accuracy {100 * accuracy:.2f} %")


if __name__ == "__main__":
    main()
