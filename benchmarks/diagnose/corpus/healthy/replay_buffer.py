# tricky: Tensors are kept from step to step, up to a bound that is reached.
# steps: 301
# device: cpu

import random
from collections import deque

import torch
from torch import nn

random.seed(110)
torch.manual_seed(110)
replay: deque[tuple[torch.Tensor, int, float, torch.Tensor]] = deque(maxlen=128)
network = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
frozen = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
frozen.load_state_dict(network.state_dict())
frozen.requires_grad_(False)
optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
state = torch.randn(4)
for step in range(364):
    with torch.no_grad():
        action = int(network(state).argmax()) if random.random() > 0.2 else random.randrange(2)
    following = 0.9 * state + 0.3 * torch.randn(4) + (0.2 if action else -0.2)
    replay.append((state, action, -abs(float(following[0])), following))
    state = following
    if len(replay) < 64:
        continue
    states, actions, rewards, others = zip(*random.sample(replay, 64), strict=True)
    wanted = torch.tensor(rewards) + 0.5 * frozen(torch.stack(others)).max(1).values
    value = network(torch.stack(states))[torch.arange(64), torch.tensor(actions)]
    loss = nn.functional.smooth_l1_loss(value, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        frozen.load_state_dict(network.state_dict())
        print(f"step {step}: loss {loss.item():.4f}")
