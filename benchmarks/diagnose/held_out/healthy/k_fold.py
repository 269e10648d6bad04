# steps: 480
# device: cpu
# tricky: Every fold makes a new model and a new optimizer; the old ones go.

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import nn

torch.manual_seed(100)
X, y = load_breast_cancer(return_X_y=True)


def new_model():
    return nn.Sequential(
        nn.Linear(30, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 2)
    )


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


scores = []
folds = StratifiedKFold(n_splits=4, shuffle=True, random_state=0)
for fold, (train, test) in enumerate(folds.split(X, y)):
    scaler = StandardScaler().fit(X[train])
    x_train = torch.tensor(scaler.transform(X[train]), dtype=torch.float32)
    x_test = torch.tensor(scaler.transform(X[test]), dtype=torch.float32)
    y_train, y_test = torch.tensor(y[train]), torch.tensor(y[test])
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for epoch in range(40):
        model.train()
        for idx in torch.randperm(len(x_train)).chunk(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x_train[idx]), y_train[idx])
            loss.backward()
            optimizer.step()
    scores.append(accuracy(model, x_test, y_test))
    print(f"fold {fold}: loss {loss.item():.4f} accuracy {scores[-1]:.3f}")
print(f"mean accuracy {np.mean(scores):.3f}")
