# subject: unfused-attention
# thread: own
# steps: 120
# gain: yes
# device: cpu
# what: Causal attention as a product, a mask, a softmax and another product, over 256 tokens.

import math

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("hidden_part", torch.triu(torch.ones(length, length, dtype=torch.bool), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # <- here
        scores = scores.masked_fill(self.hidden_part[:length, :length], float("-inf"))  # <- here
        mixed = torch.softmax(scores, dim=-1) @ v  # <- here
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 64, length: int = 256) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.attention = SelfAttention(width, 4, length)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, tokens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norms[0](x))
        return self.head(x + self.feed(self.norms[1](x)))


torch.manual_seed(101)
stream = (torch.arange(40000) * 7 + torch.arange(40000) // 50) % 64
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(120):
    ids = stream[torch.randint(0, len(stream) - 257, (8, 1)) + torch.arange(257)]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: {loss.item():.4f}")
