# subject: slow-transform
# also: starved-loader, python-time, per-sample-fetch
# thread: own
# steps: 320
# gain: yes
# device: cpu
# what: The collate function tokenises the same sentences with a regular expression in every epoch.

import random
import re

import torch
from torch import nn
from torch.utils.data import DataLoader

random.seed(8)
torch.manual_seed(8)
GOOD = "wonderful brilliant charming funny moving superb delightful warm clever touching".split()
BAD = "dull boring awful clumsy tedious weak noisy shallow lifeless predictable".split()
REST = "the a film story actor scene music plot and but with very of in this director camera end".split()


def review(positive: bool) -> str:
    words = random.choices(REST, k=36) + random.choices(GOOD if positive else BAD, k=4)
    random.shuffle(words)
    return " ".join(words).capitalize() + "!"


reviews = [(review(i % 2 == 0), i % 2) for i in range(2048)]
vocabulary = {word: i + 1 for i, word in enumerate(GOOD + BAD + REST)}
pattern = re.compile(r"\w+|[^\w\s]")


def encode(text: str) -> torch.Tensor:
    return torch.tensor([vocabulary.get(token.lower(), 0) for token in pattern.findall(text)])  # <- here


def collate(batch):
    ids = torch.stack([encode(text) for text, _ in batch])  # <- here
    return ids, torch.tensor([label for _, label in batch])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(vocabulary) + 1, 96)
        self.mix = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96))
        self.out = nn.Linear(96, 2)

    def forward(self, ids):
        words = self.words(ids)
        return self.out((words + self.mix(words)).mean(1))


loader = DataLoader(reviews, batch_size=64, shuffle=True, collate_fn=collate)  # <- here
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for epoch in range(10):
    hits = 0
    for ids, labels in loader:  # <- here
        scores = model(ids)
        loss = nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += (scores.argmax(1) == labels).sum().item()
    print(f"epoch {epoch}: {hits / len(reviews):.3f}")
