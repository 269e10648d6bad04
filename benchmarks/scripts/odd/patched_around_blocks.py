"""A context manager that puts a patch on for an evaluation, and insists on finding it there at the end."""

import contextlib

from small import data, net, train
from torch import nn


@contextlib.contextmanager
def counting(counts):
    before = nn.Module.__call__

    def counted(self, *args, **kwargs):
        counts[type(self).__name__] = counts.get(type(self).__name__, 0) + 1
        return before(self, *args, **kwargs)

    nn.Module.__call__ = counted
    yield
    assert nn.Module.__call__ is counted
    nn.Module.__call__ = before


model, (x, _), counts = net(), data(), {}
for _ in range(8):
    train(model, 15)
    with counting(counts):
        model(x)
        train(model, 3)
print(sorted(counts.items()))
