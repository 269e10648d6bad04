# subject: evaluation-with-grad
# thread: https://github.com/OpenNMT/OpenNMT-py/issues/1141
# steps: 120
# gain: no
# device: cpu
# what: The validation of a sequence model runs with gradients enabled.

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(120, 64)
        self.rnn = nn.GRU(64, 96, batch_first=True)
        self.head = nn.Linear(96, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


def validate(model: Tagger, tokens: torch.Tensor, tags: torch.Tensor) -> float:
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in zip(tokens.split(64), tags.split(64), strict=True):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


torch.manual_seed(12)
tokens = torch.randint(0, 120, (1024, 20))
tags = tokens % 12
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    chosen = torch.randint(0, 512, (32,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[chosen]).flatten(0, 1), tags[chosen].flatten())
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1}: validation loss {validate(model, tokens[512:], tags[512:]):.4f}")
