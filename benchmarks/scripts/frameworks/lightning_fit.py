"""The Trainer of Lightning: training, validation, a checkpoint."""

import logging
import warnings

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


lightning.seed_everything(0, verbose=False)
x = torch.randn(256, 20)
samples = TensorDataset(x, (x[:, 0] > 0).long())
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False,
)  # fmt: skip
model = Model()
trainer.fit(model, DataLoader(samples, 8, shuffle=True), DataLoader(samples, 32))
print({name: value.item().hex() for name, value in trainer.callback_metrics.items()}, trainer.global_step)
torch.save(model.state_dict(), "model.pt")
