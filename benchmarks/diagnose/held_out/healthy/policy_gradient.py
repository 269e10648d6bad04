# steps: 200
# device: cpu
# tricky: Log-probabilities with their graph are kept in a list for an episode and dropped after the update.

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(82)


class Policy(nn.Module):
    def __init__(self, inputs=16, actions=5, width=640):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, actions)

    def forward(self, x):
        return Categorical(logits=self.head(self.body(x)))


best = torch.randn(16, 5)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
baseline = 0.0
for epoch in range(10):
    returns = []
    for _ in range(20):
        log_probs, rewards = [], []
        observation = torch.randn(128, 16)
        for _ in range(6):
            choice = policy(observation)
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            rewards.append((observation @ best).gather(1, action[:, None]).squeeze(1))
            observation = torch.randn(128, 16)
        reward = torch.stack(rewards)
        loss = -(torch.stack(log_probs) * (reward - baseline)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        returns.append(reward.mean().item())
    print(f"epoch {epoch}: mean reward {sum(returns) / len(returns):.3f}")
