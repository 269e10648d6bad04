# subject: vanishing-gradients
# follows: loss-not-falling
# thread: own
# steps: 250
# gain: no
# device: cpu
# what: Ten ReLU layers whose weights start with a standard deviation of 0.01.

import argparse

import torch
from torch import nn


def build(depth: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(40, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    layers.append(nn.Linear(width, 6))
    net = nn.Sequential(*layers)
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(44)
    x = torch.randn(6000, 40)
    y = (x[:, :6] + 0.3 * x[:, 6:12]).argmax(1)
    net = build(args.depth, args.width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(250):
        rows = torch.randint(0, 6000, (128,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {loss.item():.4f}")


main()
