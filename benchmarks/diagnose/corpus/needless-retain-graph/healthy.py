# subject: needless-retain-graph
# thread: https://github.com/junyanz/BicycleGAN/issues/81
# steps: 500
# gain: no
# device: cpu
# what: The graph is retained for a second backward pass that never comes.

import torch
from torch import nn

torch.manual_seed(21)
inputs = torch.randn(1024, 128)
encoder = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 16))
decoder = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 128))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)


def backward_both(batch: torch.Tensor) -> torch.Tensor:
    code = encoder(batch)
    reconstruction = nn.functional.mse_loss(decoder(code), batch)
    loss = reconstruction + 1e-3 * code.square().mean()
    loss.backward()
    return loss


for step in range(500):
    optimizer.zero_grad()
    loss = backward_both(inputs[torch.randint(1024, (64,))])
    optimizer.step()
    if step % 125 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
