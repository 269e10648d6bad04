# subject: logging-time
# also: python-time
# thread: https://github.com/pytorch/pytorch/issues/43328
# steps: 150
# gain: yes
# device: cpu
# what: Histograms of all weights are written to a log in every step.

import json
import logging
import tempfile

import torch
from torch import nn

torch.manual_seed(64)
folder = tempfile.TemporaryDirectory()
logging.basicConfig(filename=f"{folder.name}/train.log", level=logging.INFO)
log = logging.getLogger("train")
x = torch.randn(1024, 64)
y = (x @ torch.randn(64, 6)).argmax(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def log_histograms(step: int) -> None:
    for name, parameter in model.named_parameters():
        counts = torch.histc(parameter.detach(), bins=64).tolist()
        log.info("%d %s %s %s", step, name, json.dumps(counts), parameter.detach().flatten().tolist())  # <- here


for step in range(150):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    log_histograms(step)  # <- here
print(f"last loss {loss.item():.4f}")
