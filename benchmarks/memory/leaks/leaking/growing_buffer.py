"""One tensor that is replaced by a longer one each step."""

import torch
from torch import nn


class Memory:
    def __init__(self, width):
        self.bank = torch.empty(0, width)

    def add(self, rows):
        self.bank = torch.cat([self.bank, rows.detach()])  # leak


def main():
    torch.manual_seed(0)
    model, memory = nn.Linear(16, 4), Memory(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(200):
        predicted = model(torch.randn(32, 16))
        loss = predicted.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.add(predicted)
    print(memory.bank.shape)


main()
