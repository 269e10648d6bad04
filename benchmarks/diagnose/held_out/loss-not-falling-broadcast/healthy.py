# subject: loss-not-falling
# thread: https://github.com/deepset-ai/FARM/issues/229
# steps: 400
# gain: no
# device: cpu
# what: Outputs of shape (N, 1) against targets of shape (N): the loss compares every row with every other.

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", category=UserWarning)


class Regressor(nn.Module):
    def __init__(self, inputs: int, hidden: int = 256) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


torch.manual_seed(88)
x = torch.randn(4000, 30)
y = x[:, :6].sum(1) / 6**0.5 + 0.1 * torch.randn(4000)
model = Regressor(30)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
for epoch in range(8):
    model.train()
    for rows in torch.randperm(4000).split(80):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]).squeeze(1), y[rows])
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    print(f"epoch {epoch}: mean squared error {sum(history[-50:]) / 50:.4f}")
