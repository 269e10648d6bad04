# subject: missing-zero-grad
# thread: https://github.com/yastrebksv/TennisCourtDetector/issues/7
# steps: 450
# gain: no
# device: cpu
# what: The trainer never clears the gradients.

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


@dataclass
class Config:
    width: int = 1024
    lr: float = 0.05
    epochs: int = 50
    batch_size: int = 160
    seed: int = 3


class BaseTrainer:
    def __init__(self, config):
        self.config = config
        torch.manual_seed(config.seed)
        images, _ = load_digits(return_X_y=True)
        images = torch.tensor(images / 16.0, dtype=torch.float32)
        self.train, self.test = train_test_split(images, test_size=357, random_state=config.seed)
        self.model = nn.Sequential(
            nn.Linear(64, config.width),
            nn.ReLU(),
            nn.Linear(config.width, config.width),
            nn.ReLU(),
            nn.Linear(config.width, 64),
        )
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr)

    def train_epoch(self):
        self.model.train()
        for idx in torch.randperm(len(self.train)).split(self.config.batch_size):
            self.optimizer.zero_grad()
            masked = self.train[idx] * (torch.rand(len(idx), 64) < 0.8)
            loss = self.criterion(self.model(masked), self.train[idx])
            loss.backward()
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def test_error(self):
        self.model.eval()
        return self.criterion(self.model(self.test), self.test).item()

    def run(self):
        for epoch in range(1, self.config.epochs + 1):
            loss = self.train_epoch()
            if epoch % 10 == 0:
                print(f"{epoch}: loss {loss:.4f} test {self.test_error():.4f}")


if __name__ == "__main__":
    BaseTrainer(Config()).run()
