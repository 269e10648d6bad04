"""Hydra: a configuration in a file of its own, a folder for each run, and logging that Hydra sets up."""

import logging

import hydra
import torch
from omegaconf import OmegaConf
from torch import nn

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="hydra_config", config_name="small")
def main(config):
    print(OmegaConf.to_yaml(config))
    torch.manual_seed(config.seed)
    model = nn.Linear(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.rate)
    for step in range(config.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 20)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item().hex())
    log.warning("loss %s", loss.item())


if __name__ == "__main__":
    main()
