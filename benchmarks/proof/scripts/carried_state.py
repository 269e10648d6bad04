"""An LSTM that carries its state from batch to batch, at a learning rate that amplifies noise; updates by hand."""

import argparse
import pathlib
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--unseeded", action="store_true")
if not parser.parse_args().unseeded:
    torch.manual_seed(5)
characters = [min(ord(c), 127) for c in pathlib.Path(random.__file__).read_text(encoding="utf-8")]
columns = torch.tensor(characters[: len(characters) // 16 * 16]).view(16, -1).t()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.lstm = nn.LSTM(32, 64, 2, dropout=0.2)
        self.head = nn.Linear(64, 128)

    def forward(self, tokens, state):
        out, state = self.lstm(self.embedding(tokens), state)
        return self.head(out), state


model = Model()
for _epoch in range(200):
    state = (torch.zeros(2, 16, 64), torch.zeros(2, 16, 64))
    for start in range(0, len(columns) - 13, 12):
        state = tuple(part.detach() for part in state)
        model.zero_grad()
        scores, state = model(columns[start : start + 12], state)
        loss = nn.functional.cross_entropy(scores.reshape(-1, 128), columns[start + 1 : start + 13].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-20.0)
