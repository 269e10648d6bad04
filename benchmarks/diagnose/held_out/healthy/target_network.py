# tricky: A second network that no optimizer trains follows the first one by copies every 40 steps.
# steps: 300
# device: cpu

import copy

import torch
from torch import nn


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 4))


torch.manual_seed(221)
moves = torch.randn(4, 6) / 3
states = torch.randn(20000, 6)
actions = torch.randint(0, 4, (20000,))
following = (0.9 * states + moves[actions] + 0.05 * torch.randn(20000, 6)).clamp(-3, 3)
rewards = -following.pow(2).mean(1)

online = mlp()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=5e-4)
for step in range(300):
    rows = torch.randint(0, 20000, (192,))
    wanted = rewards[rows] + 0.9 * target(following[rows]).amax(1)
    value = online(states[rows]).gather(1, actions[rows].unsqueeze(1)).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, wanted)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(online.parameters(), 1.0)
    optimizer.step()
    if step % 40 == 39:
        target.load_state_dict(online.state_dict())
        print(f"step {step + 1}: {loss.item():.4f}, mean value {value.mean().item():.3f}")
