"""A TorchFunctionMode of the script's own."""

from collections import Counter

from small import net, train
from torch.overrides import TorchFunctionMode


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.counts[getattr(function, "__name__", str(function))] += 1
        return function(*args, **(kwargs or {}))


with Seen() as seen:
    train(net(), 60)
print(sorted(seen.counts.items()))
