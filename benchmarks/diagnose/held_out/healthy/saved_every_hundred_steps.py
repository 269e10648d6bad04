# tricky: Checkpoints are saved and one of them is loaded again in the middle of the training.
# steps: 300
# device: cpu

import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(214)
folder = Path(tempfile.mkdtemp())
x = torch.randn(5000, 60)
y = torch.tanh(x[:, :10].sum(1, keepdim=True) / 2)


def fresh():
    net = nn.Sequential(nn.Linear(60, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)


def train(first, last):
    net, optimizer, scheduler = fresh()
    if first:
        state = torch.load(folder / f"{first}.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    for step in range(first + 1, last + 1):
        rows = torch.randint(0, 5000, (128,))
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.5f}")
            parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"{step}.pt")


train(0, 200)
train(200, 300)
