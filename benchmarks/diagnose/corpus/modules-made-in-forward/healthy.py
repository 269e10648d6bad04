# subject: modules-made-in-forward
# also: parameters-not-in-optimizer
# thread: https://github.com/graykode/nlp-tutorial/issues/29
# steps: 120
# gain: yes
# device: cpu
# what: The output projection and the norm of an attention layer are made anew in every forward pass.

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        mixed = self.output(mixed)
        return x + mixed


torch.manual_seed(19)
tokens = torch.randint(0, 50, (512, 16))
wanted = (tokens == 7).sum(1).clamp(max=3)
model = nn.Sequential(nn.Embedding(50, 256), SelfAttention(256), nn.Flatten(), nn.Linear(256 * 16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    chosen = torch.randint(0, 512, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[chosen]), wanted[chosen])
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
