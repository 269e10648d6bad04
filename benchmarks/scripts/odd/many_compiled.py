"""More compiled modules than torch compiles versions of one function, and an exception from compiled code."""

import torch
import torch._dynamo.utils
from torch import nn


def scaled(number):
    source = (
        f"class Block{number}(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * {number}\n"
    )
    namespace = {"nn": nn}
    exec(compile(source, f"<block {number}>", "exec"), namespace)
    return namespace[f"Block{number}"](4 + number, 1)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


def failing(graph, inputs):
    def run(*arguments):
        raise RuntimeError("from compiled code")

    return run


torch.manual_seed(0)
whole = Whole()
whole.compile(backend="eager", fullgraph=True)
blocks = [torch.compile(scaled(number), backend="eager") for number in range(12)]
optimizer = torch.optim.SGD([*whole.parameters(), *(p for block in blocks for p in block.parameters())], lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    loss = whole(torch.ones(2, 4)).sum()
    for number, block in enumerate(blocks):
        loss = loss + block(torch.ones(2, 4 + number)).sum()
    loss.backward()
    optimizer.step()
print(loss.item(), dict(torch._dynamo.utils.counters["stats"]))
torch.compile(Whole(), backend=failing)(torch.ones(2, 4))
