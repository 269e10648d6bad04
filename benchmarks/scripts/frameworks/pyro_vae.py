"""Pyro: a variational autoencoder, for which Pyro makes one optimizer for each parameter."""

import pyro
import torch
from pyro import distributions
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn
from torch.utils.data import DataLoader

pyro.set_rng_seed(0)


class Autoencoder(nn.Module):
    def __init__(self, size=4, hidden=32):
        super().__init__()
        self.size = size
        self.encoder = nn.Sequential(nn.Linear(16, hidden), nn.Softplus(), nn.Linear(hidden, 2 * size))
        self.decoder = nn.Sequential(nn.Linear(size, hidden), nn.Softplus(), nn.Linear(hidden, 16), nn.Sigmoid())

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("latent", distributions.Normal(x.new_zeros(len(x), self.size), 1.0).to_event(1))
            pyro.sample("seen", distributions.Bernoulli(self.decoder(z), validate_args=False).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            mean, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("latent", distributions.Normal(mean, log_scale.exp()).to_event(1))


vae = Autoencoder()
inference = SVI(vae.model, vae.guide, Adam({"lr": 1e-2}), loss=Trace_ELBO())
loader = DataLoader(torch.rand(256, 16), batch_size=32, shuffle=True)
for epoch in range(5):
    print(epoch, sum(inference.step(x) for x in loader).hex())
torch.save(vae.state_dict(), "vae.pt")
