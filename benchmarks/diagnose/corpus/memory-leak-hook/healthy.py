# subject: memory-leak
# thread: https://github.com/meta-pytorch/opacus/issues/176
# steps: 120
# gain: no
# device: cpu
# what: A forward hook for inspection stores the activations of every step.

import torch
from torch import nn

torch.manual_seed(54)
x = torch.randn(2048, 64)
y = (x @ torch.randn(64, 4)).argmax(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
activations: dict[str, torch.Tensor] = {}


def remember(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    activations["hidden"] = output.detach().clone()


model[2].register_forward_hook(remember)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    chosen = torch.randint(0, 2048, (256,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
