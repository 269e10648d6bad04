"""absl and Fire: the main function is called by a library, with arguments that it reads from sys.argv."""

import sys

import fire
import torch
from absl import app, flags
from torch import nn

flags.DEFINE_integer("steps", 30, "optimizer steps")


class Training:
    def fit(self, steps, rate=0.1):
        torch.manual_seed(0)
        model = nn.Linear(20, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 20)).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item().hex()


def main(words):
    print(words, Training().fit(flags.FLAGS.steps))
    fire.Fire(Training, command=["fit", "--steps", "20", "--rate", "0.05"])
    fire.Fire(Training, command=["fit", "--unknown"])  # exits with 2


if __name__ == "__main__":
    sys.argv += ["--steps", "40"]
    app.run(main)
