# subject: padding-waste
# thread: https://github.com/bentrevett/pytorch-sentiment-analysis/issues/45
# steps: 96
# gain: yes
# device: cpu
# what: Lengths differ by a factor of 25, and batches are drawn without regard to them.

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(40)
lengths = (4 * torch.exp(torch.randn(512).abs() * 1.3)).long().clamp(4, 100)
texts = [torch.randint(1, 60, (int(length),)) for length in lengths]
labels = torch.tensor([int(text[0] % 2) for text in texts])
embedding, head = nn.Embedding(60, 48, padding_idx=0), nn.Linear(64, 2)
rnn = nn.GRU(48, 64, batch_first=True)
optimizer = torch.optim.Adam([*embedding.parameters(), *rnn.parameters(), *head.parameters()], lr=2e-3)

for epoch in range(6):
    order = torch.argsort(lengths + torch.rand(512))
    batches = list(order.split(32))
    for index in torch.randperm(len(batches)).tolist():
        chosen = batches[index]
        padded = pad_sequence([texts[i] for i in chosen.tolist()], batch_first=True)
        states, _ = rnn(embedding(padded))
        loss = nn.functional.cross_entropy(head(states.max(dim=1).values), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
