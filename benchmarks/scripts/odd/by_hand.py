"""A loop without an optimizer."""

import sys

import torch

torch.manual_seed(0)

model = torch.nn.Linear(4, 1)
torch.nn.init.ones_(model.weight)
for _ in range(60):
    model.zero_grad()
    loss = model(torch.ones(8, 4)).pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.01)
print(loss.item().hex(), "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
