# subject: needless-find-unused-parameters
# thread: own
# steps: 200
# gain: no
# device: cpu
# what: A script for torchrun, also started alone, asks DDP for a search for unused parameters that its model does not need.

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def join() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        meeting = os.path.join(tempfile.mkdtemp(), "meeting")
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    join()
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    pixels, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(pixels[rank::processes], dtype=torch.float32) / 16
    labels = torch.tensor(labels[rank::processes])
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)  # <- here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(args.steps):
        rows = torch.randint(0, len(labels), (args.batch,))
        loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
