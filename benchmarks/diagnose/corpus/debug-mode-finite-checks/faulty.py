# subject: debug-mode
# also: python-time, hidden-sync
# thread: https://github.com/zhengqili/Neural-Scene-Flow-Fields/pull/7
# steps: 240
# gain: yes
# device: cpu
# what: Every activation and every gradient is checked for NaN in every step.

import torch
from torch import nn

torch.manual_seed(80)
x = torch.randn(512, 128)
y = (x @ torch.randn(128, 5)).argmax(1)
blocks = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(*blocks, nn.Linear(128, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def check(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    assert not torch.isnan(output).any()  # <- here
    assert not torch.isinf(output).any()  # <- here


for module in model.modules():
    module.register_forward_hook(check)
for step in range(240):
    chosen = torch.randint(0, 512, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    for parameter in model.parameters():
        assert torch.isfinite(parameter.grad).all()  # <- here
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
