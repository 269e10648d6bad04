"""An autoencoder and a classifier on its code, each with an optimizer of its own; 18 batches an epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(7)
y = torch.arange(432) % 3
x = torch.randn(432, 12) + nn.functional.one_hot(y, 12) * 1.5
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
coder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 12))
classifier = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))
first = torch.optim.Adam(coder.parameters(), lr=1e-3)
second = torch.optim.AdamW(classifier.parameters(), lr=1e-3, weight_decay=0.1)
for _epoch in range(200):
    for inputs, targets in loader:
        first.zero_grad()
        code = coder(inputs)
        nn.functional.mse_loss(code, inputs).backward()
        first.step()
        second.zero_grad()
        nn.functional.cross_entropy(classifier(code.detach()), targets).backward()
        second.step()
