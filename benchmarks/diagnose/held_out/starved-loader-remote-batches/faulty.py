# subject: starved-loader
# also: disk-time
# thread: https://github.com/bearpaw/pytorch-pose/issues/28
# steps: 180
# gain: yes
# device: cpu
# what: Each batch is one request to a feature store with latency; no request is sent before the last step has ended.

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class FeatureStore(Dataset):
    def __init__(self, n=5760, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.users = torch.randn(n, 384, generator=g)
        self.spent = self.users[:, :20].sum(1, keepdim=True) / 5 + 0.1 * torch.randn(n, 1, generator=g)

    def __len__(self):
        return len(self.users)

    def __getitem__(self, rows):
        time.sleep(0.015)  # <- here
        return self.users[rows], self.spent[rows]


class Tower(nn.Module):
    def __init__(self, width=896):
        super().__init__()
        self.inp = nn.Linear(384, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = F.gelu(self.inp(x))
        return self.out(self.norm(x + F.gelu(self.mid(x))))


def run(epochs=4):
    torch.manual_seed(12)
    store = FeatureStore()
    batches = BatchSampler(RandomSampler(store), batch_size=128, drop_last=True)
    loader = DataLoader(store, sampler=batches, batch_size=None)  # <- here
    net = Tower()
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.7)
    for ep in range(epochs):
        running = 0.0
        for users, spent in loader:  # <- here
            opt.zero_grad()
            loss = F.mse_loss(net(users), spent)
            loss.backward()
            opt.step()
            running += loss.item()
        sched.step()
        print(f"[{ep}] mse {running / len(loader):.4f}")


if __name__ == "__main__":
    run()
