# subject: repeated-to
# also: pageable-copies
# thread: https://github.com/Lightning-AI/pytorch-lightning/issues/3674
# steps: 200
# gain: yes
# device: cuda
# what: A table that was not registered as a buffer is copied to the GPU in every forward pass.

import torch
from torch import nn


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adjacency = torch.rand(2048, 2048).softmax(1)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.adjacency.to(x.device) @ x)  # <- here


torch.manual_seed(204)
model = Graph().cuda()
x = torch.randn(2048, 64, device="cuda")
y = x.roll(1, 1).mean(0, keepdim=True).expand(2048, 64)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.6f}")
