# subject: evaluation-in-train-mode
# thread: https://github.com/sinhasam/vaal/issues/2
# steps: 384
# gain: no
# device: cpu
# what: Accuracy is measured with dropout on, and batch statistics learn from the test set.

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(13)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten())
model.append(nn.Linear(32 * 36, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def accuracy() -> float:
    model.eval()
    with torch.no_grad():
        predicted = model(images[1536:]).argmax(dim=1)
    model.train()
    return (predicted == labels[1536:]).float().mean().item()


for epoch in range(16):
    for chosen in torch.randperm(1536).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy():.1%}")
