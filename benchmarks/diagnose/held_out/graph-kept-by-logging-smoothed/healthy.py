# subject: graph-kept-by-logging
# also: memory-leak
# thread: https://github.com/jostmey/NakedAttention/issues/1
# steps: 400
# gain: no
# device: cpu
# what: A smoothed loss for the progress line is a tensor that hangs on the graphs of all earlier steps.

import torch
from torch import nn

torch.manual_seed(48)
TOKENS = 30
x = torch.randint(0, TOKENS, (8000, 10))
y = (x.sum(1) % TOKENS).clamp(max=TOKENS - 1)
y[::2] = x[::2, 0]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 48)
        self.layers = nn.Sequential(nn.Linear(480, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU())
        self.out = nn.Linear(320, TOKENS)

    def forward(self, ids):
        return self.out(self.layers(self.embedding(ids).flatten(1)))


model = Bag()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
smooth = None
for i in range(400):
    rows = torch.randint(0, len(x), (128,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    smooth = loss.detach() if smooth is None else 0.97 * smooth + 0.03 * loss.detach()
    if i % 80 == 79:
        print(f"iteration {i + 1}: {smooth.item():.4f}")
