# tricky: A deep copy of the best weights after every validation, and an end that depends on it.
# steps: 300
# device: cpu

import copy

import torch
from sklearn.datasets import load_diabetes
from torch import nn

torch.manual_seed(220)
x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x / x.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
order = torch.randperm(len(x))
train, valid = order[:340], order[340:]
model = nn.Sequential(nn.Linear(10, 500), nn.ReLU(), nn.Dropout(0.3), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
best, best_state, waited = float("inf"), None, 0
for epoch in range(30):
    model.train()
    for _ in range(10):
        rows = train[torch.randint(0, len(train), (128,))]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(model(x[valid]), y[valid]).item()
    if error < best:
        best, best_state, waited = error, copy.deepcopy(model.state_dict()), 0
    else:
        waited += 1
    if waited == 20:
        break
model.load_state_dict(best_state)
print(f"{epoch + 1} epochs, best validation error {best:.4f}")
