# subject: memory-leak
# thread: https://github.com/nikhilbarhate99/PPO-PyTorch/issues/16
# steps: 600
# gain: no
# device: cpu
# what: Every batch of transitions is kept, with its features, although only the latest are drawn again.

import torch
from torch import nn


class Memory:
    def __init__(self, recent: int) -> None:
        self.recent = recent
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, states: torch.Tensor, rewards: torch.Tensor) -> None:
        self.batches.append((states, rewards))  # <- here

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        latest = self.batches[-self.recent :]
        return latest[int(torch.randint(len(latest), (1,)))]


class World:
    def __init__(self) -> None:
        self.direction = torch.randn(200)

    def act(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.randn(count, 200)
        return states, torch.tanh(states @ self.direction / 10).unsqueeze(1)


torch.manual_seed(71)
world, memory = World(), Memory(recent=10)
critic = nn.Sequential(nn.Linear(200, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=5e-4)
smoothed = 1.0
for step in range(1, 601):
    memory.add(*world.act(256))
    states, rewards = memory.draw()
    loss = nn.functional.mse_loss(critic(states), rewards)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    smoothed = 0.98 * smoothed + 0.02 * loss.item()
    if step % 100 == 0:
        print(f"{step}: {smoothed:.4f}")
