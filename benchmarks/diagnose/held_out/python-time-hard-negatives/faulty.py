# subject: python-time
# thread: own
# steps: 200
# gain: yes
# device: cpu
# what: The hardest negative of every anchor is looked for in Python loops over a list of distances.

import torch
from torch import nn

torch.manual_seed(12)
generator = torch.Generator().manual_seed(12)
identities = torch.randn(64, 128, generator=generator)


def sample(n):
    who = torch.randint(0, 64, (n,), generator=generator)
    anchor = identities[who] + 1.6 * torch.randn(n, 128, generator=generator)
    positive = identities[who] + 1.6 * torch.randn(n, 128, generator=generator)
    return anchor, positive, who


class Embedder(nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 64)

    def forward(self, x):
        return nn.functional.normalize(self.out(self.body(x)), dim=1)


def hardest_negatives(distances, who):
    table, names = distances.tolist(), who.tolist()
    found = []
    for i in range(len(names)):  # <- here
        best, best_distance = 0, float("inf")
        for j in range(len(names)):  # <- here
            if names[i] != names[j] and table[i][j] < best_distance:  # <- here
                best, best_distance = j, table[i][j]  # <- here
        found.append(best)
    return torch.tensor(found)


model = Embedder()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
triplet = nn.TripletMarginLoss(margin=0.4)
for epoch in range(5):
    losses = []
    for _ in range(40):
        anchor, positive, who = sample(320)
        a, p = model(anchor), model(positive)
        hardest = hardest_negatives(torch.cdist(a.detach(), p.detach()), who)  # <- here
        loss = triplet(a, p, p[hardest])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: triplet loss {sum(losses) / len(losses):.4f}")
