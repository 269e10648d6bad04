"""Loader workers by fork, with random numbers of their own, and an os.fork."""

import os

import torch
from small import net, train
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(3) + index


torch.manual_seed(3)
train(net(), 30)
print(sum(batch.sum().item() for batch in DataLoader(Noisy(), 4, num_workers=2)).hex())
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os.write(1, b"in the child\n")
    os._exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
