# subject: scheduler-order
# thread: https://github.com/zju3dv/NeuralRecon/issues/51
# steps: 480
# gain: no
# device: cpu
# what: The schedule is stepped at the start of every epoch, the first one too, as before PyTorch 1.1.

import numpy as np
import torch
from sklearn.datasets import make_regression
from torch import nn, optim


class Experiment:
    def __init__(self, milestones):
        x, y = make_regression(n_samples=3840, n_features=64, n_informative=20, noise=2.0, random_state=1)
        self.x = torch.from_numpy(x.astype(np.float32))
        self.y = torch.from_numpy((y / y.std()).astype(np.float32)).unsqueeze(1)
        self.net = nn.Sequential(
            nn.Linear(64, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1),
        )
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=milestones, gamma=0.2)
        self.criterion = nn.SmoothL1Loss()

    def epoch(self, number):
        losses = []
        for idx in torch.randperm(len(self.x)).split(160):
            self.optimizer.zero_grad()
            loss = self.criterion(self.net(self.x[idx]), self.y[idx])
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        self.scheduler.step()
        print(f"[{number:2d}] loss {np.mean(losses):.4f} lr {self.optimizer.param_groups[0]['lr']:.4f}")


torch.manual_seed(1)
np.random.seed(1)
experiment = Experiment(milestones=[10, 16])
for number in range(20):
    experiment.epoch(number)
