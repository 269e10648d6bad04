# subject: parameters-not-in-optimizer
# follows: missing-zero-grad
# thread: https://runebook.dev/zh/docs/pytorch/generated/torch.nn.modulelist/torch.nn.ModuleList
# steps: 480
# gain: no
# device: cpu
# what: The hidden layers are in a plain list, so that model.parameters() does not have them.

import torch
from torch import nn


class ResidualMLP(nn.Module):
    def __init__(self, n_in, width, depth, n_out):
        super().__init__()
        self.inp = nn.Linear(n_in, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.out = nn.Linear(width, n_out)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        for layer in self.hidden:
            h = h + torch.relu(layer(h)) / len(self.hidden)
        return self.out(h)


def batches(x, y, size, generator):
    order = torch.randperm(len(x), generator=generator)
    for i in range(0, len(x), size):
        yield x[order[i : i + size]], y[order[i : i + size]]


def main():
    torch.manual_seed(17)
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(5120, 48)
    y = torch.sin(x[:, :4].sum(1, keepdim=True)) + 0.5 * x[:, 4:5] * x[:, 5:6]
    model = ResidualMLP(48, 640, 3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(12):
        total = 0.0
        for xb, yb in batches(x, y, 128, generator):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(xb)
        print(f"epoch {epoch}: {total / len(x):.4f}")


main()
