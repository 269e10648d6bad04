# steps: 400
# device: cpu
# tricky: Transitions are kept from step to step, in a deque of a fixed length; the target network is in no optimizer.

import copy
import random
from collections import deque

import torch
from torch import nn

random.seed(1)
torch.manual_seed(1)
goal = torch.tensor([0.5, -0.5])
moves = torch.tensor([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.1], [0.0, -0.1]])


def act(state, action):
    """Of 64 walkers at once."""
    moved = (state + moves[action]).clamp(-1, 1)
    return moved, -(moved - goal).norm(dim=1)


q = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
q_target = copy.deepcopy(q)
optimizer = torch.optim.Adam(q.parameters(), lr=5e-4)
memory = deque(maxlen=40)
state = torch.rand(64, 2) * 2 - 1
for episode in range(10):
    reward_sum = 0.0
    for step in range(40):
        with torch.no_grad():
            greedy = q(state).argmax(1)
        explore = torch.rand(64) < 0.2
        action = torch.where(explore, torch.randint(0, 4, (64,)), greedy)
        following, reward = act(state, action)
        memory.append((state, action, reward, following))
        reward_sum += reward.mean().item()
        state = following

        states, actions, rewards, followings = map(torch.cat, zip(*random.choices(memory, k=8), strict=True))
        with torch.no_grad():
            wanted = rewards + 0.9 * q_target(followings).max(1).values
        loss = nn.functional.smooth_l1_loss(q(states).gather(1, actions[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    q_target.load_state_dict(q.state_dict())
    state = torch.rand(64, 2) * 2 - 1
    print(f"episode {episode}: mean reward {reward_sum / 40:.3f} loss {loss.item():.4f}")
