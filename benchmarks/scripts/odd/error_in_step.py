"""An optimizer's step that fails is caught, and what it held goes."""

import gc
import weakref

import torch
from small import net, train


class Big:
    pass


def failing():
    big = Big()

    def closure():
        assert big is not None
        raise ValueError("in the closure")

    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    try:
        optimizer.step(closure)
    except ValueError as error:
        print(error)
    return weakref.ref(big)


held = failing()
gc.collect()
print(held() is None)
print(train(net(), 60).hex())
held = failing()
gc.collect()
print(held() is None)
