"""torch.jit.script and a symbolic trace, in the middle of training."""

import warnings

import torch
import torch.fx
from small import data, digest, net, train

warnings.simplefilter("ignore")
model = net()
train(model, 30)
scripted = torch.jit.script(model)
train(scripted, 30)
traced = torch.fx.symbolic_trace(model)
train(traced, 30)
print(digest(model), [node.op for node in traced.graph.nodes], scripted(data()[0]).equal(traced(data()[0])))
