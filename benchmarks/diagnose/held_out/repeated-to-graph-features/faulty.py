# subject: repeated-to
# thread: own
# steps: 200
# gain: yes
# device: cpu
# what: A graph's adjacency and features are float64 from NumPy, and are converted to float32 in every step.

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(77)
rng = np.random.default_rng(77)
NODES, CLASSES = 1400, 4

community = rng.integers(0, CLASSES, NODES)
same = community[:, None] == community[None, :]
links = rng.random((NODES, NODES)) < np.where(same, 0.02, 0.004)
links = links | links.T | np.eye(NODES, dtype=bool)
degree = links.sum(1)
adjacency = torch.from_numpy(links / np.sqrt(degree[:, None] * degree[None, :]))
features = torch.from_numpy(rng.normal(size=(NODES, 1000)) + 0.3 * community[:, None])
labels = torch.from_numpy(community)
train_mask = torch.from_numpy(rng.random(NODES) < 0.3)


class GCN(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, CLASSES)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(adjacency @ self.first(x))
        return adjacency @ self.second(F.dropout(hidden, 0.5, self.training))


net = GCN(1000, 16)
optimizer = torch.optim.Adam(net.parameters(), lr=0.005, weight_decay=5e-4)
for epoch in range(200):
    net.train()
    optimizer.zero_grad()
    scores = net(adjacency.to(torch.float32), features.to(torch.float32))  # <- here
    loss = F.cross_entropy(scores[train_mask], labels[train_mask])
    loss.backward()
    optimizer.step()
    if epoch % 25 == 0:
        right = (scores.argmax(1) == labels)[~train_mask].float().mean().item()
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}  unseen nodes {right:.3f}")
