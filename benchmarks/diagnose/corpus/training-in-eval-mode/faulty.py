# subject: training-in-eval-mode
# thread: https://github.com/shubhamagarwal92/mmd/issues/14
# steps: 384
# gain: no
# device: cpu
# what: After the first evaluation dropout stays off for the rest of the training.

import torch
from torch import nn

torch.manual_seed(14)
inputs = torch.randn(2560, 64)
targets = (inputs @ torch.randn(64, 7)).argmax(dim=1)
model = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Dropout(0.4), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 7))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def evaluate() -> float:
    model.eval()  # <- here
    with torch.no_grad():
        return (model(inputs[2048:]).argmax(dim=1) == targets[2048:]).float().mean().item()


model.train()
for epoch in range(12):
    for chosen in torch.randperm(2048).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])  # <- here
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {evaluate():.1%}")
