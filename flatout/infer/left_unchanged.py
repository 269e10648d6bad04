"""Run or trace a user's module and restore it afterwards: mode, attributes, buffers, hooks.

Tracing runs the module's Python with fake tensors, so a module that stores something in `forward` (a counter, a cached
mask) would keep a fake one; running it advances its counters.

>>> from torch import nn
>>> net = nn.Dropout()
>>> with left_unchanged(net):
...     _ = net.eval()
>>> net.training
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def left_unchanged(model: nn.Module, besides: tuple[type, ...] = ()) -> Iterator[Callable[[], None]]:
    """On exit, every submodule's attributes and buffers are restored; random states too.

    besides: classes whose calls change nothing, so their buffers need not be copied.
    Yields a function that restores them early. Parameters are not copied: nothing here trains.
    """
    modules = [module for module in model.modules() if not isinstance(module, besides)]
    attributes = [(module, dict(vars(module))) for module in modules]
    contents = [(value, value.copy()) for _, known in attributes for value in known.values() if _is_container(value)]
    own = {id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}
    buffers = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in own.values()]

    def restore() -> None:
        for module, known in attributes:
            vars(module).clear()
            vars(module).update(known)
        for container, content in contents:
            _refill(container, content)
        for buffer, version, values in buffers:
            if version is None or buffer._version != version:
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(values)

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield restore
        finally:
            restore()


def version_of(tensor: Tensor) -> int | None:
    """How often it was written to; None for a tensor made in inference mode, whose writes are not counted."""
    return None if tensor.is_inference() else tensor._version


def weight_sizes(model: nn.Module) -> tuple[int, int]:
    """Number of parameters, and bytes of parameters and buffers; tied tensors count once."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sum(one.numel() for one in model.parameters()), sum(one.numel() * one.element_size() for one in tensors)


Container = dict[object, object] | list[object] | set[object]


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list | set)


def _refill(container: Container, content: Container) -> None:
    if isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif _same_items(container, content):
        return
    elif isinstance(container, list):
        container[:] = content
    elif isinstance(content, dict):
        container.clear()
        container.update(content)


def _same_items(a: Container, b: Container) -> bool:
    """By identity: comparing tensors by value would compare numbers, and raise for shapes that differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(x is y and a[x] is b[y] for x, y in zip(a, b, strict=True))
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
