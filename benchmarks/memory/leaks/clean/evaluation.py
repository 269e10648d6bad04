"""Every third step: an evaluation that collects its outputs, and keeps the best weights."""

import copy

import torch
from torch import nn


def evaluate(model, held_out):
    outputs = []
    with torch.no_grad():
        for inputs in held_out:
            outputs.append(model(inputs))
    return torch.cat(outputs).square().mean().item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    held_out = [torch.randn(32, 16) for _ in range(5)]
    best, best_state = float("inf"), None
    for step in range(200):
        loss = model(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0 and (score := evaluate(model, held_out)) < best:
            best, best_state = score, copy.deepcopy(model.state_dict())
    print(best, len(best_state))


main()
