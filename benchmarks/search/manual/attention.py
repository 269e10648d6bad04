"""Attention written as softmax(q k^T) v. By hand: torch's scaled_dot_product_attention."""

import math

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn

WIDTH, HEADS, TOKENS = 128, 4, 256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (part.view(n, t, HEADS, c // HEADS).transpose(1, 2) for part in self.qkv(x).split(c, dim=2))
        if BY_HAND:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
            y = nn.functional.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


model = nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.Linear(WIDTH, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
text = torch.randint(0, 256, (3, TOKENS + 1))

begin()
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
    optimizer.step()
    if step_ended():
        break
