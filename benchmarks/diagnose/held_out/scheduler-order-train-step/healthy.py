# subject: scheduler-order
# thread: https://github.com/yueatsprograms/uda_release/issues/3
# steps: 360
# gain: no
# device: cpu
# what: Inside train_step the cosine schedule advances between backward and the optimizer's step.

import argparse

import torch
from sklearn.datasets import load_iris
from torch import nn


class Experiment:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        x, y = load_iris(return_X_y=True)
        self.x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        self.y = torch.tensor(y)
        self.net = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.steps)

    def train_step(self):
        rows = torch.randint(0, len(self.x), (100,))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(self.x[rows]), self.y[rows])
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    experiment = Experiment(args)
    for step in range(1, args.steps + 1):
        loss = experiment.train_step()
        if step % 60 == 0:
            print(f"step {step}: {loss:.4f}")
