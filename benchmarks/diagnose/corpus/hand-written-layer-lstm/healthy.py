# subject: hand-written-layer
# also: python-time
# thread: https://github.com/georgeyiasemis/Recurrent-Neural-Networks-from-scratch-using-PyTorch/issues/1
# steps: 100
# gain: yes
# device: cpu
# what: An LSTM out of linear layers, one time step after the other.

import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


torch.manual_seed(78)
sequences = torch.randn(512, 48, 8)
labels = (sequences.mean(1)[:, 0] > 0).long()
memory, head = Memory(8, 48), nn.Linear(48, 2)
optimizer = torch.optim.Adam([*memory.parameters(), *head.parameters()], lr=5e-3)
for step in range(100):
    chosen = torch.randint(0, 512, (32,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(head(memory(sequences[chosen])), labels[chosen])
    loss.backward()
    optimizer.step()
    if step % 33 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
