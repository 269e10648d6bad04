# subject: memory-leak
# thread: https://github.com/choderalab/pinot/issues/23
# steps: 420
# gain: no
# device: cpu
# what: The trainer keeps the outputs of every batch since the start and only ever reads the last few.

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.outputs = []
        self.losses = []

    def fit(self, x, y, epochs, batch_size):
        for epoch in range(epochs):
            order = torch.randperm(len(x))
            for start in range(0, len(x), batch_size):
                idx = order[start : start + batch_size]
                self.train_batch(x[idx], y[idx])
            self.report(epoch)

    def train_batch(self, x, y):
        out = self.model(x)
        loss = F.mse_loss(out, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.outputs = [*self.outputs[-4:], out.detach()]
        self.losses.append(loss.item())

    def report(self, epoch):
        spread = torch.cat(self.outputs[-5:]).std().item()
        recent = self.losses[-20:]
        print(f"epoch {epoch}: loss {sum(recent) / len(recent):.4f}, spread of the outputs {spread:.3f}")


x = torch.randn(3840, 256)
y = torch.tanh(x @ torch.randn(256, 512) / 16)
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
Trainer(net, lr=5e-4).fit(x, y, epochs=14, batch_size=128)
