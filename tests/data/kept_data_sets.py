"""Data sets that keep their samples in memory, as people write them: those that whole batches fit, and those not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

COUNT = 11
IMAGES = torch.randn(COUNT, 3)
TIMES = itertools.count()


class Shared:
    """A TensorDataset, a Subset and a class of its own over the same memory, which numpy sees too."""

    def __init__(self) -> None:
        made = np.random.RandomState(0)
        self.array = made.randn(40, 3).astype(np.float32)
        self.labels = made.randint(0, 9, 40).tolist()
        self.x = torch.from_numpy(self.array)
        self.whole = TensorDataset(self.x, torch.arange(40))
        self.subset = Subset(self.whole, list(range(0, 40, 2)))
        self.labelled = Labelled(self.x, self.labels)


class Labelled(Dataset):  # type: ignore[type-arg]
    def __init__(self, x: Any, labels: Any) -> None:
        self.x, self.labels, self.scale, self.transform = x, labels, 2.0, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        """Scaled, with its label."""
        image = self.x[index] * self.scale - 1
        if self.transform is not None:
            image = self.transform(image)
        return image, self.labels[index]


class Memory(Dataset):  # type: ignore[type-arg]
    """The base of those below: tensors, arrays and lists of the same length."""

    factor = 3

    def __init__(self) -> None:
        made = np.random.RandomState(1)
        self.x, self.whole_numbers = torch.from_numpy(made.randn(COUNT, 3, 2)), torch.arange(COUNT)
        self.array, self.float_array = made.randn(COUNT, 4), made.randn(COUNT).astype(np.float32)
        self.fortran = np.asfortranarray(made.randn(COUNT, 4, 3))
        self.bytes = made.randint(0, 255, (COUNT, 6, 5, 3)).astype(np.uint8)
        self.labels, self.names = made.randint(0, 5, COUNT).tolist(), [f"n{i}" for i in range(COUNT)]
        self.data = [float(i) for i in range(COUNT)]
        self.calls = 0

    def __len__(self) -> int:
        return COUNT


class RowOfEach(Memory):
    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.whole_numbers[i], self.array[i], self.float_array[i], self.labels[i], self.names[i]


class Digits(Memory):
    def __getitem__(self, index: int) -> Any:
        image = torch.from_numpy(self.array[index]).unsqueeze(0)
        return image, int(self.whole_numbers[index])


class Dictionary(Memory):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index].float() / 255
        return {"x": x, "last": self.x[index].unsqueeze(-1), "y": (self.labels[index], float(self.float_array[index]))}


class OfGlobals(Memory):
    def __getitem__(self, index: int) -> Any:
        return IMAGES[index] * 2 - 1, torch.tensor(self.labels[index]), index


class ReplayBuffer(Memory):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor(self.data[i])


class SameTwice(Memory):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return x, x.clone()


class ClassAttribute(Memory):
    def __getitem__(self, index: int) -> Any:
        return [self.factor * self.x[index], torch.as_tensor(self.fortran[index], dtype=torch.float32)]


class Inherited(Digits):
    pass


class Unhashable(RowOfEach):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class SubclassOfTensors(TensorDataset):
    def __len__(self) -> int:
        return len(self.tensors[0])


DATA_SETS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(torch.randn(COUNT, 3), torch.arange(COUNT)),
    "subclass of tensors": lambda: SubclassOfTensors(torch.randn(COUNT, 3)),
    "subset of subset": lambda: Subset(Subset(TensorDataset(torch.randn(20, 3)), list(range(0, 20, 2))), [3, 1, 7, 0]),
    "subset by tensor": lambda: Subset(TensorDataset(torch.randn(9, 3)), torch.tensor([3, 1, 7])),  # type: ignore[arg-type]
    "subset by array": lambda: Subset(RowOfEach(), np.arange(5)),  # type: ignore[arg-type]
    "images seen as NCHW": lambda: TensorDataset(torch.randn(9, 4, 4, 3).permute(0, 3, 1, 2)),
    "nan": lambda: TensorDataset(torch.tensor([float("nan"), 1.0, 2.0])),
    "row of each": RowOfEach,
    "digits": Digits,
    "dictionary": Dictionary,
    "of globals": OfGlobals,
    "replay buffer": ReplayBuffer,
    "the same twice": SameTwice,
    "class attribute": ClassAttribute,
    "inherited": Inherited,
    "unhashable": Unhashable,
    "changing": lambda: Shared().labelled,
}


class Counting(Memory):
    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.x[index]


class WritesItem(Memory):
    def __getitem__(self, index: int) -> Any:
        self.whole_numbers[index] = 7
        return self.x[index]


class Appends(Memory):
    def __getitem__(self, index: int) -> Any:
        self.data.append(1.0)
        return self.x[index]


class Draws(Memory):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] + torch.rand(())


class DrawsInPython(Memory):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if random.random() < 0.5:
            x = x.flip(0)
        return x


class Property(Memory):
    @property
    def computed(self) -> Any:
        self.calls += 1
        return self.x

    def __getitem__(self, index: int) -> Any:
        return self.computed[index]


class Intercepts(Memory):
    def __getattribute__(self, name: str) -> Any:
        if name == "x":
            object.__setattr__(self, "calls", object.__getattribute__(self, "calls") + 1)
        return object.__getattribute__(self, name)

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class Many(Memory):
    def __getitems__(self, indices: list[int]) -> Any:
        self.calls += 1
        return [self.x[i] + 1 for i in indices]

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class Sequence(list):  # type: ignore[type-arg]
    pass


class OwnSequence(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.labels = Sequence(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.labels[index]


class Neighbour(Memory):
    def __getitem__(self, index: int) -> Any:
        return self.x[index - 1]


class Mutable(Memory):
    def __getitem__(self, index: int) -> Any:
        return [self.x[index]][0]


class OwnTransform(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.transform = torch.nn.Dropout(0.5)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.x[index])


class Super(Digits):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label + next(TIMES) * 0


class Empty(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.x = self.x[:0]

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class IntOfFraction(Memory):
    def __getitem__(self, index: int) -> Any:
        return int(self.float_array[index])


def closure() -> Any:
    stored = torch.randn(COUNT, 2)

    class Inside(Memory):
        def __getitem__(self, index: int) -> Any:
            return stored[index]

    return Inside()


def made_from_text() -> Any:
    names: dict[str, Any] = {"Memory": Memory, "TIMES": TIMES}
    exec("class Told(Memory):\n    def __getitem__(self, i):\n        return self.x[i] + next(TIMES) * 0", names)
    return names["Told"]()


LEFT_ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    "counts": (Counting, "self.calls += 1"),
    "writes an item": (WritesItem, "writes to self.whole_numbers[index]"),
    "appends": (Appends, "self.data.append(1.0)"),
    "draws": (Draws, "torch.rand"),
    "draws in Python": (DrawsInPython, "decides by"),
    "property": (Property, "computed"),
    "attributes intercepted": (Intercepts, "computed"),
    "many at once": (Many, "not fetched by a plain __getitem__"),
    "a sequence of its own": (OwnSequence, "takes samples from a Sequence"),
    "another index": (Neighbour, "computes"),
    "indexed again": (Mutable, "computes"),
    "its own transform": (OwnTransform, "Dropout"),
    "super": (Super, "super()"),
    "empty": (Empty, "out of range"),
    "int of a fraction": (IntOfFraction, "int()"),
    "closure": (closure, "variables of a function around it"),
    "from text": (made_from_text, "not available"),
    "gradients": (lambda: TensorDataset(torch.randn(COUNT, 2, requires_grad=True)), "unusual"),
    "parameter": (lambda: TensorDataset(torch.nn.Parameter(torch.ones(COUNT, 2), requires_grad=False)), "unusual"),
}
