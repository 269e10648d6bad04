# subject: mixed-devices
# also: model-on-cpu, pageable-copies, repeated-to
# thread: own
# steps: 100
# gain: yes
# device: cuda
# what: The embedding stays on the host, and its output is sent to the GPU.

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 512)  # <- here
        self.encoder = nn.LSTM(512, 256, batch_first=True).cuda()
        self.head = nn.Linear(256, 16).cuda()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens).cuda())[0])  # <- here


torch.manual_seed(206)
tokens = torch.randint(0, 20000, (2048, 64))
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(100):
    batch = tokens[torch.randint(0, 2048, (64,))]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), (batch % 16).flatten().cuda())
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
