"""Models and optimizers copied, pickled and restored between steps."""

import copy
import io
import pickle

import torch
from small import digest, net, train

model = net()
optimizer = torch.optim.Adam(model.parameters())
train(model, 40, optimizer)
clone = copy.deepcopy(model)
other = pickle.loads(pickle.dumps(model))
memory = io.BytesIO()
torch.save((model, optimizer), memory)
memory.seek(0)
third, third_optimizer = torch.load(memory, weights_only=False)
for one in (model, clone, other):
    train(one, 20)
train(third, 20, third_optimizer)
print([digest(one) for one in (model, clone, other, third)])
