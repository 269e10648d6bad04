"""Train a small convolutional network with batch normalisation on scikit-learn's handwritten digits.

python digits_cnn.py --epochs 10
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """The digits as 1x8x8 images; every fifth one is kept for the test."""

    def __init__(self, train: bool, samples: int = 0):
        digits = load_digits()
        for_test = np.arange(len(digits.target)) % 5 == 4
        chosen = ~for_test if train else for_test
        self.images = (digits.images[chosen] / 16.0).astype(np.float32)
        self.labels = digits.target[chosen]
        if samples:
            self.images, self.labels = self.images[:samples], self.labels[:samples]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).unsqueeze(0)
        return image, int(self.labels[index])


class ConvNet(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.norm3(self.conv3(x)))
        return self.head(x.mean(dim=(2, 3)))


def evaluate(model, loader, device):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            output = model(images)
            loss += F.cross_entropy(output, labels, reduction="sum").item()
            correct += (output.argmax(dim=1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description="ConvNet on scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--samples", type=int, default=0, help="use only the first N training images (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_loader = DataLoader(Digits(train=True, samples=args.samples), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Digits(train=False), batch_size=256)

    model = ConvNet(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(1, args.epochs + 1):
        model.train()
        running_loss = 0.0
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        scheduler.step()
        test_loss, accuracy = evaluate(model, test_loader, device)
        print(
            f"epoch {epoch:3d}  train loss {running_loss / len(train_loader):.4f}  "
            f"test loss {test_loss:.4f}  test accuracy {100 * accuracy:.2f} %"
        )


if __name__ == "__main__":
    main()
