# tricky: Two loaders of different lengths, one of which starts again in the middle of an epoch.
# steps: 90
# device: cpu

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(113)
weights = torch.randn(128, 4)
labelled = torch.randn(640, 128)
classes = (labelled @ weights).argmax(1)
unlabelled = torch.randn(1920, 128)
labelled_loader = DataLoader(TensorDataset(labelled, classes), batch_size=32, shuffle=True)
unlabelled_loader = DataLoader(TensorDataset(unlabelled), batch_size=64, shuffle=True)
encoder = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
head, decoder = nn.Linear(1024, 4), nn.Linear(1024, 128)
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters(), *decoder.parameters()], lr=5e-4)
again = itertools.chain.from_iterable(itertools.repeat(labelled_loader))
for epoch in range(3):
    for (x, y), (other,) in zip(again, unlabelled_loader, strict=False):
        hidden = encoder(torch.cat([x, other]))
        loss = nn.functional.cross_entropy(head(hidden[: len(x)]), y)
        loss = loss + 0.3 * nn.functional.mse_loss(decoder(hidden[len(x) :]), other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
