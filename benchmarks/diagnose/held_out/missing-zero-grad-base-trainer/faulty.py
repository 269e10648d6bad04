# subject: missing-zero-grad
# follows: exploding-gradients, loss-not-falling
# thread: https://github.com/yastrebksv/TennisCourtDetector/issues/7
# steps: 420
# gain: no
# device: cpu
# what: A trainer with epochs, validation and a scheduler, in which nothing ever clears the gradients.

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


class BaseTrainer:
    def __init__(self, model, optimizer, scheduler, train_set, valid_set):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.train_set, self.valid_set = train_set, valid_set
        self.criterion = nn.CrossEntropyLoss()

    def train_epoch(self):
        self.model.train()
        images, labels = self.train_set
        losses = []
        for rows in torch.randperm(len(images)).split(96)[:14]:
            loss = self.criterion(self.model(images[rows]), labels[rows])
            loss.backward()  # <- here
            self.optimizer.step()  # <- here
            losses.append(loss.item())
        self.scheduler.step()
        return sum(losses) / len(losses)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        images, labels = self.valid_set
        return (self.model(images).argmax(1) == labels).float().mean().item()


def main():
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    rows, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[15, 25])
    trainer = BaseTrainer(
        model, optimizer, scheduler, (images[rows], labels[rows]), (images[held_out], labels[held_out])
    )
    for epoch in range(30):
        loss = trainer.train_epoch()
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, validation {trainer.validate():.3f}")


if __name__ == "__main__":
    main()
