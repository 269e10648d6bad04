# subject: padding-waste
# thread: https://github.com/yoyolicoris/music-spectrogram-diffusion-pytorch/issues/35
# steps: 120
# gain: yes
# device: cpu
# what: Event sequences of 10 to 40 tokens are all padded to the longest that the model allows, 96.

import random

import torch
from torch import nn

MAX_LENGTH, PAD, TOKENS = 96, 0, 120
random.seed(31)
torch.manual_seed(31)


def melody() -> list[int]:
    start, pace = random.randint(1, 60), random.choice([1, 2, 3])
    return [1 + (start + pace * i) % (TOKENS - 1) for i in range(random.randint(10, 40))]


melodies = [melody() for _ in range(900)]


def pad(batch: list[list[int]]) -> torch.Tensor:
    length = max(len(one) for one in batch)
    return torch.tensor([one + [PAD] * (length - len(one)) for one in batch])


class Composer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, width, padding_idx=PAD)
        self.place = nn.Embedding(MAX_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
        return self.out(self.layers(x, mask=mask, src_key_padding_mask=ids == PAD))


model = Composer()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    random.shuffle(melodies)
    total = 0.0
    for start in range(0, len(melodies), 30):
        ids = pad(melodies[start : start + 30])
        optimizer.zero_grad()
        out = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / 30:.3f}")
