# subject: logging-time
# also: python-time, disk-time
# thread: own
# steps: 250
# gain: yes
# device: cpu
# what: The log of a run gets all outputs of each batch as text.

import logging
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

logging.basicConfig(filename=tempfile.mkdtemp() + "/run.log", level=logging.DEBUG, format="%(asctime)s %(message)s")
log = logging.getLogger("train")


def main():
    torch.manual_seed(26)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-4)
    step = 0
    for epoch in range(25):
        for rows in torch.randperm(1280).split(128):
            out = model(pixels[rows])
            loss = nn.functional.cross_entropy(out, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                log.debug("step %d loss %.5f", step, loss.item())
        if epoch % 5 == 4:
            log.info("epoch %d done", epoch)
            print(f"epoch {epoch + 1}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
