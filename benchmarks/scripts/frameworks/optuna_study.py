"""Optuna: six trainings, one after another, with rates and sizes that it suggests."""

import optuna
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

optuna.logging.set_verbosity(optuna.logging.WARNING)
x = torch.randn(512, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x[:, 0] > 0).long())


def objective(trial):
    torch.manual_seed(0)
    hidden = trial.suggest_categorical("hidden", [16, 32])
    model = nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    for _ in range(3):
        for inputs, targets in DataLoader(data, batch_size=32, shuffle=True):
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=6)
for trial in study.trials:
    print(trial.number, trial.params, trial.value.hex())
