# subject: disk-time
# thread: own
# steps: 200
# gain: yes
# device: cpu
# what: The latest checkpoint is written after every step instead of after every epoch.

import os
import shutil
import tempfile

import torch
from torch import nn

torch.manual_seed(3)
save_dir = tempfile.mkdtemp(prefix="run_")


def save_checkpoint(model, optimizer, epoch, name="latest.pt"):
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, os.path.join(save_dir, name))  # <- here


def main():
    x = torch.randn(5120, 128)
    weight = torch.randn(128, 16)
    y = (x @ weight + torch.randn(5120, 16)).argmax(1)
    model = nn.Sequential(nn.Linear(128, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(10):
        total = 0.0
        for idx in torch.randperm(len(x)).split(256):
            loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            save_checkpoint(model, optimizer, epoch)  # <- here
        print(f"epoch {epoch}: {total / 20:.4f}")
    shutil.rmtree(save_dir)


if __name__ == "__main__":
    main()
