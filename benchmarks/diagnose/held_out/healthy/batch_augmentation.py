# tricky: Each batch is shifted, scaled and partly erased anew, all of it at once.
# steps: 200
# device: cpu

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(208)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)


def augment(batch):
    batch = torch.roll(batch, shifts=int(torch.randint(-1, 2, ())), dims=2)
    batch = batch * (0.8 + 0.4 * torch.rand(len(batch), 1, 1))
    top, left = torch.randint(0, 7, (2, len(batch), 1))
    row, column = torch.arange(8).view(1, 8, 1), torch.arange(8).view(1, 1, 8)
    top, left = top.unsqueeze(2), left.unsqueeze(2)
    erased = (row >= top) & (row < top + 2) & (column >= left) & (column < left + 2)
    return batch.masked_fill(erased, 0.0).flatten(1)


model = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for epoch in range(20):
    model.train()
    for rows in torch.randperm(len(labels))[:1600].split(160):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(augment(images[rows])), labels[rows])
        loss.backward()
        optimizer.step()
    if epoch % 5 == 4:
        model.eval()
        with torch.no_grad():
            right = (model(images.flatten(1)).argmax(1) == labels).float().mean()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, plain images {right:.3f}")
