# subject: parameters-not-in-optimizer
# thread: own
# steps: 250
# gain: no
# device: cpu
# what: Groups with learning rates of their own name the encoder and the head, and forget the pooling between them.

import torch
from torch import nn


class AttentionPool(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(self.score(x), dim=1) * x).sum(1)


class SetClassifier(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.pool = AttentionPool(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.encoder(x)))


def main() -> None:
    torch.manual_seed(90)
    bags = torch.randn(3000, 16, 10)
    labels = bags[:, :, :3].amax(1).argmax(1)
    model = SetClassifier()
    groups = [  # <- here
        {"params": model.encoder.parameters(), "lr": 3e-4},
        {"params": model.head.parameters(), "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)  # <- here
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(5):
        right = 0
        for rows in torch.randperm(len(bags)).split(60):
            out = model(bags[rows])
            loss = nn.functional.cross_entropy(out, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (out.argmax(1) == labels[rows]).sum().item()
        scheduler.step()
        print(f"epoch {epoch}: accuracy {right / len(bags):.3f}")


if __name__ == "__main__":
    main()
