"""Loaders with persistent workers go when the script drops them."""

import gc
import multiprocessing

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
samples = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
for fold in range(2):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(samples, batch_size=16, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    del loader, x, y
    gc.collect()
    print("fold", fold, "worker processes:", len(multiprocessing.active_children()))
