"""A run in which a script computes the same numbers, bit for bit, each time it is started on this machine.

    environment.deterministic_environment()     # what must be set in a new process, or before CUDA starts
    make_deterministic()                        # the rest, as soon as torch and numpy are imported

torch then uses deterministic kernels and, where there is none, raises an error that names the operation. What the
script seeds or sets itself comes later and wins. Loader workers take their seeds from torch's generator. What remains
is up to the script: the clock, threads, files that it reads and changes.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.parameters import parameters_of
from flatout.script.patches import ImportWatch
from flatout.tensor_bytes import bytes_view

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.levers.subject import Subject

SEED = 0


def make_deterministic() -> None:
    """Seed Python's generator now, numpy's and torch's when they are imported; set torch's switches then."""
    random.seed(SEED)
    ImportWatch({"torch": _switch_torch, "numpy": lambda numpy: numpy.random.seed(SEED)}).install()


def _switch_torch(torch: ModuleType) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def weights_digests(subject: Subject) -> list[tuple[str, str]]:
    """(name, digest of dtype, shape and bits) of all weights and buffers that a script trained; each name once."""
    named: list[tuple[str, Tensor]] = [
        (f"{type(module).__name__}.{name}", tensor)
        for module in subject.modules
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    seen = {id(tensor) for _, tensor in named}
    for optimizer in subject.optimizers:
        named += [
            (f"parameter {index} of {type(optimizer).__name__}", one)
            for index, one in enumerate(parameters_of(optimizer))
            if id(one) not in seen
        ]
    times: Counter[str] = Counter()
    found = []
    for name, tensor in named:
        times[name] += 1
        found.append((name if times[name] == 1 else f"{name} #{times[name]}", _digest(tensor)))
    return found


def _digest(tensor: Tensor) -> str:
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + bytes_view(tensor).numpy().tobytes()).hexdigest()[:16]
