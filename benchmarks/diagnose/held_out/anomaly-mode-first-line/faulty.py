# subject: anomaly-mode
# thread: https://github.com/Xingyu-Lin/mbpo_pytorch/issues/8
# steps: 500
# gain: yes
# device: cpu
# what: A soft actor critic with anomaly detection switched on at the top of the file.

import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)  # <- here
torch.manual_seed(23)
OBSERVED, ACTIONS = 12, 3
pull = torch.randn(OBSERVED, ACTIONS) / 3


def reward(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return -(actions - torch.tanh(states @ pull)).pow(2).sum(1, keepdim=True)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, outputs))


actor, critics = mlp(OBSERVED, 2 * ACTIONS), nn.ModuleList([mlp(OBSERVED + ACTIONS, 1) for _ in range(2)])
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)


def act(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, log_std = actor(states).chunk(2, dim=1)
    log_std = log_std.clamp(-4, 1)
    raw = mean + log_std.exp() * torch.randn_like(mean)
    density = -0.5 * ((raw - mean) / log_std.exp()).pow(2) - log_std
    squashed = torch.tanh(raw)
    return squashed, (density - torch.log(1 - squashed.pow(2) + 1e-6)).sum(1, keepdim=True)


for update in range(250):
    states = torch.randn(256, OBSERVED)
    with torch.no_grad():
        actions = (act(states)[0] + 0.1 * torch.randn(256, ACTIONS)).clamp(-1, 1)
        wanted = reward(states, actions)
    both = torch.cat([states, actions], dim=1)
    critic_loss = sum(nn.functional.mse_loss(critic(both), wanted) for critic in critics)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

    actions, log_density = act(states)
    both = torch.cat([states, actions], dim=1)
    actor_loss = (0.05 * log_density - torch.min(critics[0](both), critics[1](both))).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    if update % 50 == 49:
        print(f"{update + 1}: critic {critic_loss.item():.4f}, actor {actor_loss.item():.4f}")
