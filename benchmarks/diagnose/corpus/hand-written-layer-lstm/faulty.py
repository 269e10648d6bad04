# subject: hand-written-layer
# also: python-time
# thread: https://github.com/georgeyiasemis/Recurrent-Neural-Networks-from-scratch-using-PyTorch/issues/1
# steps: 100
# gain: yes
# device: cpu
# what: An LSTM out of linear layers, one time step after the other.

import torch
from torch import nn


class Memory(nn.Module):  # <- here
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(inputs + width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = memory = torch.zeros(len(x), self.width)
        for step in range(x.shape[1]):
            gates = self.gates(torch.cat([x[:, step], hidden], dim=1))  # <- here
            forget, enter, leave, new = gates.chunk(4, dim=1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(memory)
        return hidden


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
