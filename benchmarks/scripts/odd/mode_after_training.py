"""No mode of torch's dispatcher is on outside of what the script does."""

import torch
from small import net, train
from torch.utils._python_dispatch import _get_current_dispatch_mode

for steps in (3, 9, 12, 20, 21, 22, 41, 42, 43, 100):
    model = net()
    train(model, steps)
    print(steps, _get_current_dispatch_mode())
    with torch.no_grad():
        model(torch.ones(3, 20))
    print(_get_current_dispatch_mode())
