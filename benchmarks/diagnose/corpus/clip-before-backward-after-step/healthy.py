# subject: clip-before-backward
# thread: https://github.com/VGraphRNN/VGRNN/issues/4
# steps: 420
# gain: no
# device: cpu
# what: Clipping comes after the optimizer's step, and the next zero_grad throws its result away.

import torch
from torch import nn

torch.manual_seed(5)
nodes, features = 256, 48
adjacency = (torch.rand(nodes, nodes) < 0.05).float()
adjacency = (adjacency + adjacency.T + torch.eye(nodes)).clamp(max=1)
adjacency = adjacency / adjacency.sum(dim=1, keepdim=True)
signals = torch.randn(nodes, features)
classes = (adjacency @ signals @ torch.randn(features, 6)).argmax(dim=1)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 256), nn.Linear(256, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(adjacency @ torch.relu(self.first(adjacency @ x)))


model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(420):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(signals), classes)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    if step % 140 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
