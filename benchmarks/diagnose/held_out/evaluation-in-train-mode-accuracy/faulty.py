# subject: evaluation-in-train-mode
# thread: https://github.com/udacity/deep-learning-v2-pytorch/issues/3
# steps: 300
# gain: no
# device: cpu
# what: The test accuracy is computed with dropout on and with batch norm that learns from the test set.

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train_x, train_y = images[:1440], labels[:1440]
test_x, test_y = images[1440:], labels[1440:]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 1024)
        self.bn1 = nn.BatchNorm1d(1024)
        self.fc2 = nn.Linear(1024, 1024)
        self.bn2 = nn.BatchNorm1d(1024)
        self.fc3 = nn.Linear(1024, 10)
        self.dropout = nn.Dropout(p=0.4)

    def forward(self, x):
        x = self.dropout(F.relu(self.bn1(self.fc1(x))))
        x = self.dropout(F.relu(self.bn2(self.fc2(x))))
        return F.log_softmax(self.fc3(x), dim=1)


model = Classifier()
criterion = nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

epochs = 30
train_losses, test_accuracies = [], []
for e in range(epochs):
    running_loss = 0
    for idx in torch.randperm(len(train_x)).split(144):
        optimizer.zero_grad()
        loss = criterion(model(train_x[idx]), train_y[idx])
        loss.backward()
        optimizer.step()
        running_loss += loss.item()

    hits = 0
    with torch.no_grad():
        for x, y in zip(test_x.split(119), test_y.split(119), strict=True):
            hits += (model(x).argmax(dim=1) == y).sum().item()  # <- here
    train_losses.append(running_loss / 10)
    test_accuracies.append(hits / len(test_y))
    print(f"Epoch {e + 1}/{epochs}.. loss {train_losses[-1]:.3f}.. test accuracy {test_accuracies[-1]:.3f}")
