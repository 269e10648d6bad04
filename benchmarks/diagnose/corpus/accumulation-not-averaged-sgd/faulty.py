# subject: accumulation-not-averaged
# thread: https://github.com/facebookresearch/fairseq/issues/5256
# steps: 384
# gain: no
# device: cpu
# what: Accumulation by the number of the batch, without a division.

import torch
from torch import nn

torch.manual_seed(10)
inputs = torch.randn(4096, 64)
targets = inputs @ torch.randn(64, 3) / 8
model = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
accumulation_steps = 4

optimizer.zero_grad()
for epoch in range(24):
    for index, chosen in enumerate(torch.randperm(len(inputs)).split(64)):
        loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
        loss.backward()  # <- here
        if (index + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
