"""Tracebacks that the script itself prints show its own lines and torch's."""

import traceback

import torch
from small import net, train
from torch.utils.data import DataLoader


class Broken(torch.nn.Module):
    def forward(self, x):
        raise ValueError("forward")


class Function(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("backward")


class Samples:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise ValueError("data")


w = torch.ones(1, requires_grad=True)
for _ in range(2):
    for attempt in (
        lambda: torch.nn.Sequential(Broken())(w),
        lambda: Function.apply(w).backward(),
        lambda: torch.autograd.grad(Function.apply(w), w),
        lambda: next(iter(DataLoader(Samples()))),
        lambda: torch.ones(3).backward(),
    ):
        try:
            attempt()
        except Exception:
            print(traceback.format_exc())
    train(net(), 60)
