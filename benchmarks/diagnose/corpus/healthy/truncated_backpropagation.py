# tricky: The hidden state is carried from window to window, detached.
# steps: 120
# device: cpu

import torch
from torch import nn

torch.manual_seed(104)
text = (torch.arange(16 * 1921) * 7 % 31).view(16, 1921)
embedding, rnn, head = nn.Embedding(31, 48), nn.LSTM(48, 96, batch_first=True), nn.Linear(96, 31)
parameters = [*embedding.parameters(), *rnn.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=2e-3)
for epoch in range(2):
    state = None
    for start in range(0, 1920, 32):
        window = text[:, start : start + 33]
        if state is not None:
            state = tuple(part.detach() for part in state)
        output, state = rnn(embedding(window[:, :-1]), state)
        loss = nn.functional.cross_entropy(head(output).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
