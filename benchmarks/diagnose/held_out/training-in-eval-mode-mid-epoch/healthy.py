# subject: training-in-eval-mode
# thread: https://github.com/wkentaro/pytorch-fcn/pull/56
# steps: 384
# gain: no
# device: cpu
# what: Validation in the middle of an epoch leaves the model in eval mode for what remains of the epoch.

import torch
from sklearn.datasets import load_wine
from torch import nn


class Trainer:
    def __init__(self, model, optimizer, train, val, interval_validate):
        self.model = model
        self.optim = optimizer
        self.train_x, self.train_y = train
        self.val_x, self.val_y = val
        self.interval_validate = interval_validate
        self.iteration = 0

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            score = self.model(self.val_x)
            val_loss = nn.functional.cross_entropy(score, self.val_y).item()
        print(f"iteration {self.iteration}: validation loss {val_loss:.4f}")
        self.model.train()

    def train_epoch(self):
        self.model.train()
        for idx in torch.randperm(len(self.train_x)).split(128):
            if self.iteration % self.interval_validate == 0:
                self.validate()
            self.optim.zero_grad()
            score = self.model(self.train_x[idx])
            loss = nn.functional.cross_entropy(score, self.train_y[idx])
            loss.backward()
            self.optim.step()
            self.iteration += 1

    def train(self, epochs):
        for _ in range(epochs):
            self.train_epoch()


torch.manual_seed(1337)
x, y = load_wine(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(y)
pick = torch.randint(0, len(x), (5120,))
x, y = x[pick] + 0.4 * torch.randn(5120, 13), y[pick]
network = nn.Sequential(
    nn.Linear(13, 1024),
    nn.BatchNorm1d(1024),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(1024, 3),
)
sgd = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
trainer = Trainer(network, sgd, (x[:4096], y[:4096]), (x[4096:], y[4096:]), interval_validate=20)
trainer.train(epochs=12)
