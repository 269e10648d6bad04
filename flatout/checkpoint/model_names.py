"""Names of parameters as the model's author wrote them: without the prefixes of compiling and wrapping.

torch.compile adds `_orig_mod.` where a module was compiled, DistributedDataParallel adds `module.` in front of all. A
module of the user's that is called `module` keeps its name: only a wrapper's own child is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from flatout.torch_private.attributes import ORIGINAL_MODULE

_PARALLEL = "module"


def plain_names(model: torch.nn.Module) -> Callable[[str], str]:
    """A name in this model's state_dict -> the same without its wrappers."""
    wrapped = set()
    for path, module in model.named_modules(remove_duplicate=False):
        child = _wrapped_child(module)
        if child is not None:
            wrapped.add(f"{path}.{child}" if path else child)

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in wrapped)

    return plain


def _wrapped_child(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return _PARALLEL
    return ORIGINAL_MODULE if ORIGINAL_MODULE in module._modules else None


def without_wrappers(saved: Mapping[str, object], here: Set[str]) -> dict[str, object]:
    """A saved state_dict, perhaps not saved by Flatout, under plain names; `here` are the model's own plain names."""
    plain = {
        ".".join(part for part in name.split(".") if part != ORIGINAL_MODULE): value for name, value in saved.items()
    }
    prefix = f"{_PARALLEL}."
    if not all(name.startswith(prefix) for name in plain):
        return plain
    bare = {name.removeprefix(prefix): value for name, value in plain.items()}
    return bare if len(bare.keys() & here) > len(plain.keys() & here) else plain
