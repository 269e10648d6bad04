# subject: graph-kept-by-logging
# also: memory-leak
# thread: https://github.com/BatsResearch/labelmodels/issues/4
# steps: 300
# gain: no
# device: cpu
# what: The running loss is a sum of tensors, which holds the graph of every batch.

import torch
from torch import nn

torch.manual_seed(55)
votes = torch.randint(-1, 2, (4096, 24)).float()
truth = (votes.sum(1) > 0).float()
model = nn.Sequential(nn.Linear(24, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
running_loss = 0.0
for step in range(300):
    chosen = torch.randint(0, 4096, (128,))
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(votes[chosen]).squeeze(1), truth[chosen])
    loss.backward()
    optimizer.step()
    running_loss += loss.item()
print(f"mean loss {float(running_loss) / 300:.4f}")
