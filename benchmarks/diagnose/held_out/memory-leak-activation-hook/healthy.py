# subject: memory-leak
# thread: own
# steps: 400
# gain: no
# device: cpu
# what: A forward hook for activation statistics stores every activation of the run.

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(5)
digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32).div(16)
Y = torch.tensor(digits.target)
X = X.repeat(4, 1)[:6400] + 0.05 * torch.randn(6400, 64)
Y = Y.repeat(4)[:6400]

model = nn.Sequential(
    nn.Linear(64, 1024),
    nn.GELU(),
    nn.Linear(1024, 1024),
    nn.GELU(),
    nn.Linear(1024, 10),
)

activations = {}


def watch(name):
    def hook(module, inputs, output):
        activations[name] = output.detach()

    return hook


model[1].register_forward_hook(watch("first"))
model[3].register_forward_hook(watch("second"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    perm = torch.randperm(len(X))
    for i in range(0, len(X), 160):
        batch = perm[i : i + 160]
        loss = nn.functional.cross_entropy(model(X[batch]), Y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    zeros = {name: (kept < 0.01).float().mean().item() for name, kept in activations.items()}
    print(f"epoch {epoch} loss {loss.item():.4f} near zero: {zeros}")
