"""A compiled model that is trained: what is traced, and how often."""

import torch
import torch._dynamo.utils
from small import net, train

model = net()
compiled = torch.compile(model, backend="eager")
print(train(compiled, 60).hex())
print(dict(torch._dynamo.utils.counters["frames"]), dict(torch._dynamo.utils.counters["graph_break"]))
with torch.no_grad():
    compiled(torch.ones(3, 20))
print(dict(torch._dynamo.utils.counters["frames"]))
