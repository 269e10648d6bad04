# steps: 400
# device: cpu
# tricky: A copy of the weights is in no optimizer: it follows the model as a moving average and is only evaluated.

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for shadow, param in zip(self.shadow.parameters(), model.parameters(), strict=True):
            shadow.lerp_(param, 1 - self.decay)


torch.manual_seed(2)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
model = nn.Sequential(
    nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
ema = EMA(model, decay=0.97)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(40):
    model.train()
    for idx in torch.randperm(len(train_x)).split(140):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train_x[idx]), train_y[idx])
        loss.backward()
        optimizer.step()
        ema.update(model)
    if epoch % 10 == 9:
        with torch.no_grad():
            accuracy = (ema.shadow(test_x).argmax(1) == test_y).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.4f} EMA accuracy {accuracy:.3f}")
