"""The numbers of hooks, which some scripts print or keep."""

import torch
from small import net, train

model = net()
handles = [model[0].register_forward_pre_hook(lambda *_: None), model[2].register_full_backward_hook(lambda *_: None)]
print([handle.id for handle in handles], list(model[0]._forward_pre_hooks))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
print(optimizer.register_step_post_hook(lambda *_: None).id)
train(model, 60, optimizer)
print(model[0].register_forward_hook(lambda *_: None).id)
