"""An ordinary training script of a chosen size, which times its own steps and knows nothing of Flatout.

python training.py mlp --width 256 --batch 64 --steps 2000
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("mlp", "cnn", "gpt"))
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--times", help="a file for when the steps ended, in seconds on the machine's clock")
arguments = parser.parse_args()
torch.manual_seed(0)
width, tokens = arguments.width, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


if arguments.kind == "mlp":
    data = torch.randn(4096, 64)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
elif arguments.kind == "cnn":
    data = torch.randn(1024, 3, 32, 32)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )
else:
    data = torch.randint(0, 256, (1024, tokens))
    model = nn.Sequential(
        nn.Embedding(256, width), *(Block() for _ in range(4)), nn.Flatten(), nn.Linear(tokens * width, 10)
    )
targets = torch.randint(0, 10, (len(data),))
loader = DataLoader(TensorDataset(data, targets), batch_size=arguments.batch, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if arguments.times:
    open(arguments.times, "w").close()  # tells that training begins
ends = [time.perf_counter()]
while len(ends) <= arguments.steps:
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
        if len(ends) > arguments.steps:
            break
if arguments.times:
    with open(arguments.times, "w") as file:
        json.dump(ends, file)
