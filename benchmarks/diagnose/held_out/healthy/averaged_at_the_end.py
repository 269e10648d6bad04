# tricky: The second half of the training adds to an averaged model, and scores it with eval() and no_grad.
# steps: 240
# device: cpu

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

torch.manual_seed(222)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
model = nn.Sequential(
    nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
averaged = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
slow = SWALR(optimizer, swa_lr=0.02, anneal_epochs=4)
for epoch in range(24):
    model.train()
    batches = torch.randperm(1400)[:1280].split(128)
    for rows in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    if epoch >= 12:
        averaged.update_parameters(model)
        slow.step()
    else:
        scheduler.step()
update_bn([pixels[rows] for rows in torch.arange(1400).split(140)], averaged)
averaged.eval()
with torch.no_grad():
    right = (averaged(pixels[1400:]).argmax(1) == labels[1400:]).float().mean().item()
print(f"loss {loss.item():.4f}, held out {right:.3f}")
