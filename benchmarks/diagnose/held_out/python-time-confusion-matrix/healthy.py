# subject: python-time
# thread: own
# steps: 250
# gain: yes
# device: cpu
# what: After each step the confusion matrix is filled one prediction at a time.

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Metrics:
    def __init__(self, classes):
        self.matrix = np.zeros((classes, classes), dtype=np.int64)

    def update(self, predicted, wanted):
        np.add.at(self.matrix, (wanted.numpy(), predicted.numpy()), 1)

    def accuracy(self):
        return np.trace(self.matrix) / max(1, self.matrix.sum())


for epoch in range(5):
    metrics = Metrics(10)
    for step in range(50):
        rows = torch.randint(0, len(labels), (384,))
        out = model(images[rows])
        loss = nn.functional.cross_entropy(out, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(out.argmax(1), labels[rows])
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {metrics.accuracy():.3f}")
