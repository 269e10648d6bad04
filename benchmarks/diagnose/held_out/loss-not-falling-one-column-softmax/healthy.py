# subject: loss-not-falling
# also: vanishing-gradients
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: A softmax over a single column is always one, so that no gradient leaves the output.

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

torch.manual_seed(34)
x, y = load_breast_cancer(return_X_y=True)
x = torch.tensor(StandardScaler().fit_transform(x), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32).unsqueeze(1)


class Diagnosis(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(30, 400)
        self.fc2 = nn.Linear(400, 400)
        self.fc3 = nn.Linear(400, 1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return torch.sigmoid(self.fc3(x))


model = Diagnosis()
criterion = nn.BCELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(30):
    total = 0.0
    for rows in torch.randperm(len(x))[:560].split(56):
        optimizer.zero_grad()
        loss = criterion(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 6 == 5:
        print(f"epoch {epoch + 1}: {total / 10:.4f}")
