# subject: scheduler-order
# thread: https://github.com/michuanhaohao/reid-strong-baseline/issues/190
# steps: 640
# gain: no
# device: cpu
# what: An epoch begins with the step of its scheduler, also the first.

import torch
from torch import nn


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[8, 14], gamma=0.3)

    def train_epoch(self, images: torch.Tensor, classes: torch.Tensor) -> float:
        total = 0.0
        for batch, wanted in zip(images.split(32), classes.split(32), strict=True):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(batch), wanted)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / 32


torch.manual_seed(3)
images = torch.randn(1024, 1, 16, 16)
classes = (images.flatten(1) @ torch.randn(256, 5)).argmax(1)
trainer = Trainer()
for epoch in range(20):
    trainer.scheduler.step()  # <- here
    print(f"epoch {epoch}: loss {trainer.train_epoch(images, classes):.4f}")
