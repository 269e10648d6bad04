# subject: parameters-not-in-optimizer
# follows: missing-zero-grad
# thread: own
# steps: 400
# gain: no
# device: cpu
# what: A projection is added to the model after the optimizer was made.

import torch
from torch import nn


def make_model(width):
    return nn.Sequential(nn.Linear(100, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


def make_optimizer(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4)


def train_one_epoch(model, optimizer, x, y):
    running = 0.0
    chunks = torch.randperm(len(x)).chunk(40)
    for chunk in chunks:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x[chunk]), y[chunk])
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / len(chunks)


if __name__ == "__main__":
    torch.manual_seed(31)
    centres = torch.randn(12, 100)
    y = torch.randint(0, 12, (40 * 144,))
    x = centres[y] + 4.0 * torch.randn(len(y), 100)
    model = make_model(1024)
    optimizer = make_optimizer(model)  # <- here
    model.append(nn.Linear(1024, 256))  # <- here
    model.append(nn.Tanh())
    model.append(nn.Linear(256, 12))  # <- here
    for epoch in range(10):
        print(epoch, train_one_epoch(model, optimizer, x, y))
