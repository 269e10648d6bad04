"""A wide last layer. By hand: torch's linear_cross_entropy in chunks, which never holds all scores (saves memory)."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn

WIDTH, VOCABULARY = 128, 16384


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mlp = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, x):
        return nn.functional.gelu(self.mlp(self.embedding(x)))

    def forward(self, x):
        return self.head(self.hidden(x))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
text = torch.randint(0, VOCABULARY, (2, 129))

begin()
while True:
    optimizer.zero_grad()
    x, y = text[:, :-1], text[:, 1:].flatten()
    if BY_HAND:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=128)
        hidden = model.hidden(x).flatten(0, 1)
        loss = nn.functional.linear_cross_entropy(hidden, model.head.weight, y, options=options)
    else:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    loss.backward()
    optimizer.step()
    if step_ended():
        break
