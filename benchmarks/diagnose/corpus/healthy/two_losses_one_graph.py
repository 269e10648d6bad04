# tricky: retain_graph that is needed: two losses go back through the same encoder, one after the other.
# steps: 300
# device: cpu

import torch
from torch import nn

torch.manual_seed(115)
x = torch.randn(2048, 64)
kind, amount = (x @ torch.randn(64, 4)).argmax(1), x[:, :1] * 2
encoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
classifier, regressor = nn.Linear(256, 4), nn.Linear(256, 1)
everything = nn.ModuleList([encoder, classifier, regressor])
optimizer = torch.optim.Adam(everything.parameters(), lr=1e-3)
for step in range(300):
    chosen = torch.randint(0, 2048, (64,))
    hidden = encoder(x[chosen])
    first = nn.functional.cross_entropy(classifier(hidden), kind[chosen])
    second = nn.functional.mse_loss(regressor(hidden), amount[chosen])
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    second.backward()
    nn.utils.clip_grad_norm_(everything.parameters(), 5.0)
    optimizer.step()
    if step % 75 == 0:
        print(f"step {step}: losses {first.item():.4f} and {second.item():.4f}")
