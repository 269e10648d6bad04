# subject: thread-oversubscription
# thread: https://github.com/edbeeching/godot_rl_agents/pull/266
# steps: 300
# gain: yes
# device: cpu
# what: A setting for a large node asks for 24 threads, many more than there are cores.

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--threads", type=int, default=24, help="of a node of the cluster")
args = parser.parse_args()
if args.threads:
    torch.set_num_threads(args.threads)  # <- here

torch.manual_seed(50)
states = torch.randn(6400, 64)
returns = torch.tanh(states[:, :8].sum(1, keepdim=True) / 3)
value = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(value.parameters(), lr=5e-4)
for epoch in range(args.epochs):
    total = 0.0
    for rows in torch.randperm(len(states)).split(128):
        loss = nn.functional.mse_loss(value(states[rows]), returns[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / 50:.4f}")
