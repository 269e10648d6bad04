# steps: 480
# device: cpu
# tricky: The trained teacher is in eval mode and in no optimizer while the student learns from it.

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def mlp(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model, x, y, epochs, teacher=None, temperature=3.0):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(epochs):
        model.train()
        for idx in torch.randperm(len(x)).split(128):
            logits = model(x[idx])
            loss = F.cross_entropy(logits, y[idx])
            if teacher is not None:
                with torch.no_grad():
                    soft = F.softmax(teacher(x[idx]) / temperature, dim=1)
                student = F.log_softmax(logits / temperature, dim=1)
                loss = 0.5 * loss + 0.5 * temperature**2 * F.kl_div(student, soft, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


torch.manual_seed(70)
centres = torch.randn(15, 90)
y = torch.randint(0, 15, (5120,))
x = centres[y] + 3.0 * torch.randn(5120, 90)
teacher = mlp(90, 1024, 1024, 15)
train(teacher, x, y, epochs=5)
teacher.eval()
student = mlp(90, 512, 512, 15)
train(student, x, y, epochs=7, teacher=teacher)
