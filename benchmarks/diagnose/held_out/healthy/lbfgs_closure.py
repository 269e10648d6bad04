# steps: 160
# device: cpu
# tricky: L-BFGS calls the closure several times a step, so that there are more backward passes than steps.

import torch
from sklearn.datasets import load_diabetes
from torch import nn

torch.manual_seed(4)
x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32) * 20
y = torch.tensor(y, dtype=torch.float32).unsqueeze(1)
y = (y - y.mean()) / y.std()

net = nn.Sequential(nn.Linear(10, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=3, history_size=6)


def closure():
    optimizer.zero_grad()
    penalty = sum(p.pow(2).sum() for p in net.parameters())
    loss = nn.functional.mse_loss(net(x), y) + 1e-4 * penalty
    loss.backward()
    return loss


for epoch in range(8):
    for _ in range(20):
        loss = optimizer.step(closure)
    print(f"epoch {epoch}: {loss.item():.4f}")
