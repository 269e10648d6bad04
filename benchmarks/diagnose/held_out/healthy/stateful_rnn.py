# steps: 300
# device: cpu
# tricky: The hidden state lives from batch to batch, but its graph is cut before each.

import torch
from torch import nn

torch.manual_seed(28)
VOCAB, STREAMS, WINDOW = 40, 32, 20
table = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB), 1)
tokens = torch.empty(STREAMS, 50 * WINDOW + 1, dtype=torch.long)
tokens[:, 0] = torch.randint(0, VOCAB, (STREAMS,))
for t in range(50 * WINDOW):
    tokens[:, t + 1] = torch.multinomial(table[tokens[:, t]], 1).squeeze(1)


class LanguageModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.rnn = nn.LSTM(64, width, batch_first=True)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, x, state):
        h, state = self.rnn(self.embed(x), state)
        return self.out(h), state


def repackage(state):
    return None if state is None else tuple(part.detach() for part in state)


model = LanguageModel(256)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(6):
    state, losses = None, []
    for start in range(0, 50 * WINDOW, WINDOW):
        x, target = tokens[:, start : start + WINDOW], tokens[:, start + 1 : start + WINDOW + 1]
        state = repackage(state)
        logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: {sum(losses) / len(losses):.3f}")
