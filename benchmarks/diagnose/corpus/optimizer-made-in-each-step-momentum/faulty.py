# subject: optimizer-made-in-each-step
# also: loss-not-falling
# thread: own
# steps: 280
# gain: no
# device: cpu
# what: SGD with momentum is made inside the loop over batches: it never has any momentum.

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=64, shuffle=True, drop_last=True)
model = nn.Sequential(
    nn.Conv2d(1, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 36, 64), nn.ReLU(), nn.Linear(64, 10)
)

for epoch in range(10):
    for batch, labels in loader:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)  # <- here
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
