"""All weights as views of one flat buffer."""

import torch
from small import net, train

model = net()
flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
torch.nn.utils.vector_to_parameters(flat, model.parameters())
train(model, 60)
print(flat.norm().item().hex(), torch.cat([one.data.view(-1) for one in model.parameters()]).equal(flat))
