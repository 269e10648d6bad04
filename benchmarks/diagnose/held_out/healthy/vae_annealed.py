# tricky: The loss rises for a while, because the weight of its second term grows.
# steps: 240
# device: cpu

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class VAE(nn.Module):
    def __init__(self, hidden: int = 400, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(204)
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        beta = min(1.0, epoch / 10)
        total = 0.0
        for rows in torch.randperm(len(pixels))[:1728].split(144):
            out, mean, log_var = model(pixels[rows])
            likelihood = nn.functional.binary_cross_entropy_with_logits(out, pixels[rows], reduction="sum")
            divergence = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum()
            loss = (likelihood + beta * divergence) / len(rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: {total / 12:.3f} at beta {beta:.1f}")


main()
