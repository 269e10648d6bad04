# subject: python-time
# thread: https://github.com/IBM/pytorch-seq2seq/issues/34
# steps: 240
# gain: yes
# device: cpu
# what: The loss is computed sample by sample in a Python loop.

import torch
from torch import nn

torch.manual_seed(61)
sources = torch.randint(0, 40, (512, 16))
model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 40))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(240):
    chosen = torch.randint(0, 512, (64,))
    targets = (sources[chosen] + 1) % 40
    outputs = model(sources[chosen])
    optimizer.zero_grad()
    loss = torch.zeros(())
    for output, target in zip(outputs, targets, strict=True):  # <- here
        loss = loss + criterion(output, target) / len(chosen)  # <- here
    loss.backward()
    optimizer.step()
    if step % 80 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
