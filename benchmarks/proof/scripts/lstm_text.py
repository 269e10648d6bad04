"""An LSTM over Python's own source, with clipped gradients."""

import argparse
import pathlib
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    random.seed(3)
    torch.manual_seed(3)
text = torch.tensor([min(ord(c), 127) for c in pathlib.Path(random.__file__).read_text(encoding="utf-8")])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 24)
        self.lstm = nn.LSTM(24, 48, batch_first=True)
        self.head = nn.Linear(48, 128)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _step in range(3000):
    starts = [random.randrange(len(text) - 25) for _ in range(8)]
    batch = torch.stack([text[s : s + 25] for s in starts])
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 128), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
