# subject: recompilations
# thread: https://github.com/GeeeekExplorer/nano-vllm/issues/105
# steps: 120
# gain: yes
# device: cpu
# what: A compiled model with static shapes meets a new length of sequence every few steps.

import torch
from torch import nn

torch.manual_seed(42)
tokens = torch.randint(0, 80, (512, 64))
model = nn.Sequential(nn.Embedding(80, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 80))
compiled = torch.compile(model, backend="eager", dynamic=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(120):
    length = 16 + step % 40
    batch = tokens[torch.randint(0, 512, (16,)), :length]
    optimizer.zero_grad()
    logits = compiled(batch)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
