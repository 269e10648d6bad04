# subject: graph-kept-by-logging
# also: memory-leak
# thread: https://github.com/samuelyu2002/ImVisible/issues/2
# steps: 300
# gain: no
# device: cpu
# what: AverageMeter gets the losses as tensors with their graphs and adds them up over an epoch.

import argparse

import torch
from torch import nn


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum, self.count = 0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.manual_seed(9)
    points = torch.randn(12800, 40)
    place = torch.stack([points[:, :5].mean(1), points[:, 5:9].amax(1)], dim=1)
    kind = (points[:, 9] * points[:, 10] > 0).long()
    trunk = nn.Sequential(nn.Linear(40, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
    where, what = nn.Linear(400, 2), nn.Linear(400, 2)
    parameters = [*trunk.parameters(), *where.parameters(), *what.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9)
    losses_place, losses_kind = AverageMeter(), AverageMeter()
    for epoch in range(args.epochs):
        losses_place.reset()
        losses_kind.reset()
        for rows in torch.randperm(12800).split(128):
            shared = trunk(points[rows])
            loss_place = nn.functional.mse_loss(where(shared), place[rows])
            loss_kind = nn.functional.cross_entropy(what(shared), kind[rows])
            optimizer.zero_grad()
            (loss_place + loss_kind).backward()
            optimizer.step()
            losses_place.update(loss_place, len(rows))  # <- here
            losses_kind.update(loss_kind, len(rows))  # <- here
        print(f"epoch {epoch}: place {losses_place.avg:.4f}, kind {losses_kind.avg:.4f}")


if __name__ == "__main__":
    main()
