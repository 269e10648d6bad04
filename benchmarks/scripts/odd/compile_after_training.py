"""torch.compile, torch.export and torch.jit.trace after training."""

import torch
import torch._dynamo.utils
from small import net, train

model = net()
train(model, 44)
compiled = torch.compile(model.eval(), backend="aot_eager")
with torch.no_grad():
    print(compiled(torch.ones(3, 20)).shape, dict(torch._dynamo.utils.counters["frames"]))
print(len(list(torch.export.export(model, (torch.ones(3, 20),)).graph.nodes)))
print(torch.jit.trace(model, torch.ones(3, 20))(torch.ones(1, 20)).shape)
