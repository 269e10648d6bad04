# subject: accumulation-without-no-sync
# thread: https://github.com/pytorch/pytorch/issues/43201
# steps: 20
# gain: yes
# device: cpu
# what: Two processes exchange their gradients after each of four micro-batches.

import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn


def work(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(46)
    torch.set_num_threads(1)
    x = torch.randn(256, 512)
    y = (x @ torch.randn(512, 4)).argmax(1)
    layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(20):
        optimizer.zero_grad()
        for micro in range(4):
            chosen = torch.randint(0, 256, (8,))
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen]) / 4
            loss.backward()  # <- here
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {4 * loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "store"),), nprocs=2)
