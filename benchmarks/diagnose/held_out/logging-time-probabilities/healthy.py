# subject: logging-time
# also: python-time
# follows: disk-time
# thread: own
# steps: 280
# gain: yes
# device: cpu
# what: All probabilities of the batch go to the log at every step.

import json
import logging
import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(14)
log_file = Path(tempfile.mkdtemp()) / "train.log"
logging.basicConfig(filename=log_file, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
logger = logging.getLogger("train")

N_CLASSES = 100
prototypes = torch.randn(N_CLASSES, 200)
labels = torch.randint(0, N_CLASSES, (6400,))
inputs = prototypes[labels] + 1.5 * torch.randn(6400, 200)

model = nn.Sequential(nn.Linear(200, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, N_CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
loss_function = nn.CrossEntropyLoss()

global_step = 0
for epoch in range(7):
    for idx in torch.randperm(len(inputs)).split(160):
        logits = model(inputs[idx])
        loss = loss_function(logits, labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if global_step % 100 == 0:
            probabilities = logits.detach().softmax(1).tolist()
            logger.info("step %d %s", global_step, json.dumps({"loss": loss.item(), "probs": probabilities}))
        global_step += 1
    print(f"epoch {epoch} loss {loss.item():.4f}")
print("log of", log_file.stat().st_size // 1024, "KiB")
log_file.unlink()
