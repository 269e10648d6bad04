# steps: 320
# device: cpu
# tricky: Predictions of an epoch are collected in a list for a score of the whole; the next epoch begins a new list.

import torch
from sklearn.metrics import roc_auc_score
from torch import nn

torch.manual_seed(60)
x = torch.randn(6400, 50)
probability = torch.sigmoid(2 * (x[:, 0] * x[:, 1] + x[:, 2]))
y = torch.bernoulli(probability)

model = nn.Sequential(nn.Linear(50, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
for epoch in range(8):
    predictions, truths = [], []
    for idx in torch.randperm(len(x)).split(160):
        logits = model(x[idx]).squeeze(1)
        loss = criterion(logits, y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predictions.append(torch.sigmoid(logits.detach()))
        truths.append(y[idx])
    auc = roc_auc_score(torch.cat(truths).numpy(), torch.cat(predictions).numpy())
    print(f"epoch {epoch}: loss {loss.item():.4f} AUC {auc:.3f}")
