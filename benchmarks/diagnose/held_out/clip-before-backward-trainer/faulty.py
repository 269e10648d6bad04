# subject: clip-before-backward
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: The trainer clips the norm of gradients right after clearing them; backward comes later.

import torch
from sklearn.datasets import load_diabetes
from torch import nn


class Trainer:
    def __init__(self, model: nn.Module, lr: float, clip: float) -> None:
        self.model = model
        self.clip = clip
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.history: list[float] = []

    def fit(self, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
        self.model.train()
        for step in range(steps):
            rows = torch.randint(0, len(x), (64,))
            self.update(x[rows], y[rows])
            if step % 60 == 59:
                print(f"{step + 1} steps: {sum(self.history[-60:]) / 60:.4f}")

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.smooth_l1_loss(self.model(x), y)
        self.optimizer.zero_grad()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)  # <- here
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item())


torch.manual_seed(55)
table, progression = load_diabetes(return_X_y=True)
x = torch.tensor(table, dtype=torch.float32) * 20
y = torch.tensor((progression - progression.mean()) / progression.std(), dtype=torch.float32).unsqueeze(1)
network = nn.Sequential(nn.Linear(10, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))
Trainer(network, lr=0.01, clip=1.0).fit(x, y, 300)
