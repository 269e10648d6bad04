# subject: parameters-not-in-optimizer
# follows: missing-zero-grad
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: The loss has learnable weights of its tasks, but the optimizer is given the network only.

import torch
from sklearn.datasets import load_diabetes
from torch import nn


class UncertaintyLoss(nn.Module):
    """Weighs a regression and a classification by learnt variances."""

    def __init__(self):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, value, logit, target):
        regression = nn.functional.mse_loss(value, target)
        classification = nn.functional.binary_cross_entropy_with_logits(logit, (target > 0).float())
        losses = torch.stack([regression, classification])
        return (torch.exp(-self.log_var) * losses + self.log_var).sum()


class TwoHeads(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.value = nn.Linear(width, 1)
        self.logit = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.value(h).squeeze(1), self.logit(h).squeeze(1)


torch.manual_seed(8)
table, target = load_diabetes(return_X_y=True, scaled=False)
table = torch.tensor(table, dtype=torch.float32)
target = torch.tensor(target, dtype=torch.float32)
table, target = (table - table.mean(0)) / table.std(0), (target - target.mean()) / target.std()
pick = torch.randint(0, len(table), (5120,))
table, target = table[pick] + 0.1 * torch.randn(5120, 10), target[pick]

net = TwoHeads(10, 1024)
criterion = UncertaintyLoss()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)  # <- here
for epoch in range(15):
    for rows in torch.randperm(len(table)).split(256):
        optimizer.zero_grad()
        loss = criterion(*net(table[rows]), target[rows])  # <- here
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, log variances {criterion.log_var.tolist()}")
