# subject: parameters-not-in-optimizer
# thread: https://github.com/pytorch/pytorch/issues/38639
# steps: 300
# gain: no
# device: cpu
# what: The heads of a model with three tasks are in a plain dict, so that parameters() does not know them.

import torch
from torch import nn

TASKS = {"height": 1, "weight": 1, "group": 5}


class MultiTask(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(width, size) for name, size in TASKS.items()})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        shared = self.trunk(x)
        return {name: self.heads[name](shared) for name in TASKS}


def loss_of(out: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> torch.Tensor:
    height = nn.functional.mse_loss(out["height"], wanted["height"])
    weight = nn.functional.mse_loss(out["weight"], wanted["weight"])
    return height + weight + nn.functional.cross_entropy(out["group"], wanted["group"])


torch.manual_seed(3)
x = torch.randn(6000, 48)
wanted = {
    "height": x[:, :4].sum(1, keepdim=True) / 2,
    "weight": torch.tanh(x[:, 4:8].sum(1, keepdim=True)),
    "group": x[:, 8:13].argmax(1),
}
model = MultiTask(48, 448)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(300):
    rows = torch.randint(0, 6000, (128,))
    loss = loss_of(model(x[rows]), {name: values[rows] for name, values in wanted.items()})
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 59:
        print(f"step {step + 1}: {loss.item():.4f}")
