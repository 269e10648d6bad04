"""Every output of training is kept for a metric at the end."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
outputs = []
labels = []

for step in range(200):
    inputs, targets = torch.randn(64, 16), torch.randint(0, 4, (64,))
    predicted = model(inputs)
    loss = nn.functional.cross_entropy(predicted, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outputs.append(predicted)  # leak
    labels.append(step % 4)

print(len(torch.cat(outputs)))
