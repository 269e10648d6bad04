"""PyTorch Ignite: its engines for training and evaluation, with metrics."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 1, 8, 8)
data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
metrics = {"accuracy": Accuracy(), "loss": Loss(nn.CrossEntropyLoss())}
evaluator = create_supervised_evaluator(model, metrics=metrics)


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(DataLoader(data, batch_size=256))
    print(engine.state.epoch, engine.state.output.hex(), evaluator.state.metrics)


trainer.run(DataLoader(data, batch_size=32, shuffle=True), max_epochs=5)
torch.save(model.state_dict(), "model.pt")
