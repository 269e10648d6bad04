# subject: disk-time
# thread: https://github.com/deepchem/deepchem/issues/458
# steps: 200
# gain: yes
# device: cpu
# what: Model and optimizer, 10 MB, are written to disk every second step.

import argparse
import os
import tempfile

import torch
from torch import nn


def save(path, model, optimizer, step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=None)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()
    path = os.path.join(args.out or tempfile.mkdtemp(), "checkpoint.pt")
    torch.manual_seed(16)
    fingerprints = (torch.rand(4096, 512) < 0.1).float()
    assays = (fingerprints @ torch.randn(512, 12) > 0).float()
    model = nn.Sequential(
        nn.Linear(512, 768), nn.ReLU(), nn.Dropout(0.2), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 12)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(1, 201):
        rows = torch.randint(0, 4096, (128,))
        loss = criterion(model(fingerprints[rows]), assays[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0:
            save(path, model, optimizer, step)
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
