# subject: unfused-attention
# thread: https://github.com/pytorch/torchtitan/pull/999
# steps: 60
# gain: yes
# device: cpu
# what: Attention written as two products and a softmax.

import math

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)  # <- here
        mixed = weights @ v  # <- here
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


torch.manual_seed(52)
text = torch.arange(30000) * 7 % 61 + torch.randint(0, 3, (30000,))
model = nn.Sequential(nn.Embedding(64, 64), Block(64, 4), Block(64, 4), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    starts = torch.randint(0, 29700, (4, 1))
    window = text[starts + torch.arange(257)]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
