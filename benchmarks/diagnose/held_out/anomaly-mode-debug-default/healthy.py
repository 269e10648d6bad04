# subject: anomaly-mode
# thread: own
# steps: 150
# gain: yes
# device: cpu
# what: A debug option that turns anomaly detection on was left on by default.

import argparse

import torch
from torch import nn


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--debug", type=int, default=0)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        h = torch.tanh(self.linear(self.norm(x)))
        return x + self.scale * h * torch.sigmoid(h)


args = parse_args()
torch.manual_seed(55)
torch.autograd.set_detect_anomaly(bool(args.debug))
x = torch.randn(3840, 64)
y = (x[:, :3].prod(1) > 0).long()
model = nn.Sequential(
    nn.Linear(64, args.width), *(Block(args.width) for _ in range(args.depth)), nn.Linear(args.width, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for epoch in range(args.epochs):
    correct = 0
    for idx in torch.randperm(len(x)).split(128):
        logits = model(x[idx])
        loss = nn.functional.cross_entropy(logits, y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == y[idx]).sum().item()
    print(f"epoch {epoch}: accuracy {correct / len(x):.3f}")
