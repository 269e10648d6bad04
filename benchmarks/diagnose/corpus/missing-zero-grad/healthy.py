# subject: missing-zero-grad
# follows: exploding-gradients, loss-not-falling
# thread: https://github.com/pytorch/pytorch/issues/47175
# steps: 720
# gain: no
# device: cpu
# what: Gradients of all earlier batches are added up, because nobody clears them.

import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(3072, 96)
targets = (inputs @ torch.randn(96, 12)).argmax(dim=1)
model = nn.Sequential(nn.Linear(96, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(15):
    order = torch.randperm(len(inputs))
    for chosen in order.split(64):
        loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
