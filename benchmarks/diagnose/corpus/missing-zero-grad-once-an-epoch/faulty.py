# subject: missing-zero-grad
# follows: exploding-gradients, loss-not-falling
# thread: https://github.com/salesforce/corr_based_prediction/issues/1
# steps: 576
# gain: no
# device: cpu
# what: zero_grad stands above the loop over batches, so that gradients pile up within an epoch.

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(1)
digits = load_digits()
pixels = torch.tensor(digits.data[:1536], dtype=torch.float32) / 16
labels = torch.tensor(digits.target[:1536])
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_epoch() -> float:
    total = 0.0
    optimizer.zero_grad()
    for chosen in torch.randperm(len(pixels)).split(32):
        loss = nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen])
        loss.backward()  # <- here
        optimizer.step()  # <- here
        total += loss.item()
    return total


for epoch in range(12):
    print(f"epoch {epoch}: loss {train_epoch() / 48:.4f}")
