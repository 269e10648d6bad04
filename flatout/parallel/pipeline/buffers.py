"""A model's buffers around forward passes that are no part of the training: of measurements, or to find shapes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from flatout.levers.changing_buffers import version_of


class Buffers:
    """As they are now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[str, nn.Module, str, Tensor, Tensor, int]] = [
            (f"{path}.{name}".lstrip("."), module, name, buffer, buffer.clone(), version_of(buffer))
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def put_back(self, apart_from: Collection[nn.Module] = ()) -> list[str]:
        """Returns the names of those whose values had changed, but for those of the given modules."""
        found = []
        with torch.no_grad():
            for path, module, name, buffer, values, version in self._kept:
                # custom kernels write values without torch's count of changes
                written = version_of(buffer) != version or (
                    buffer.layout is torch.strided and not torch.equal(buffer, values)
                )
                now = module._buffers.get(name)
                replaced = now is not None and now.shape == values.shape and not torch.equal(now, values)
                if written:
                    buffer.copy_(values)
                module._buffers[name] = buffer
                if (written or replaced) and module not in apart_from:
                    found.append(path)
        return found
