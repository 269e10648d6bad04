# subject: needless-retain-graph
# thread: https://github.com/andy194673/joust/issues/4
# steps: 250
# gain: no
# device: cpu
# what: One backward pass in each update, with retain_graph=True.

import torch
from torch import nn

torch.manual_seed(15)
STATES, ACTIONS = 80, 12
policy_table = torch.randint(0, ACTIONS, (STATES,))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Embedding(STATES, 64)
        self.memory = nn.GRU(64, 96, batch_first=True)
        self.action = nn.Linear(96, ACTIONS)
        self.value = nn.Linear(96, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.memory(self.state(states))[0]
        return self.action(hidden), self.value(hidden).squeeze(-1)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)


def update(states: torch.Tensor, actions: torch.Tensor) -> float:
    logits, values = agent(states)
    policy_loss = nn.functional.cross_entropy(logits.flatten(0, 1), actions.flatten())
    value_loss = nn.functional.mse_loss(values, (actions == 0).float())
    update_loss = policy_loss + 0.5 * value_loss
    optimizer.zero_grad()
    update_loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 2.0)
    optimizer.step()
    return update_loss.item()


for turn in range(1, 251):
    states = torch.randint(0, STATES, (64, 10))
    loss = update(states, policy_table[states])
    if turn % 50 == 0:
        print(f"update {turn}: {loss:.4f}")
