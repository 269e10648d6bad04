# subject: needless-retain-graph
# thread: https://github.com/shenweichen/DeepCTR-Torch/issues/69
# steps: 500
# gain: no
# device: cpu
# what: A loss and a regularisation of embeddings, added before one backward pass that keeps its graph.

import torch
from torch import nn

torch.manual_seed(22)
fields, vocabulary = 8, 500
clicks = torch.randint(0, vocabulary, (4096, fields))
labels = ((clicks[:, 0] + clicks[:, 1]) % 2).float()


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.layers = nn.Sequential(nn.Linear(16 * fields, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(x).flatten(1)).squeeze(1)


model = ClickModel()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for step in range(500):
    chosen = torch.randint(len(clicks), (256,))
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(clicks[chosen]), labels[chosen])
    total = loss + 1e-6 * model.embedding.weight.square().sum()
    total.backward()
    optimizer.step()
    if step % 125 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
