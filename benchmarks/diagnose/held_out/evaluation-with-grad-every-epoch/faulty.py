# subject: evaluation-with-grad
# thread: https://github.com/chrischoy/FCGF/issues/15
# steps: 200
# gain: no
# device: cpu
# what: Every epoch ends with a validation in evaluation mode, but with gradients on.

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(70)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(labels))
train, valid = order[:1280], order[1280:]

net = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Dropout(0.3), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=4e-4)


def validate() -> tuple[float, float]:
    net.eval()
    total, right = 0.0, 0
    for rows in valid.split(100):
        out = net(pixels[rows])  # <- here
        total += nn.functional.cross_entropy(out, labels[rows], reduction="sum").item()  # <- here
        right += (out.argmax(1) == labels[rows]).sum().item()
    return total / len(valid), right / len(valid)


best = 0.0
for epoch in range(20):
    net.train()
    for rows in train[torch.randperm(len(train))].split(128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(pixels[rows]), labels[rows]).backward()
        optimizer.step()
    loss, accuracy = validate()
    best = max(best, accuracy)
    if epoch % 4 == 3:
        print(f"epoch {epoch + 1}: validation loss {loss:.4f}, accuracy {accuracy:.3f}, best {best:.3f}")
