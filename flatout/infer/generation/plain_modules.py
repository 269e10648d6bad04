"""Whether a model computes only what its weights say: modules of exactly the known classes, with nothing added.

Generation reads weights and runs them itself. Anything else in the forward pass would be lost silently: a LoRA layer's
second product, a steering hook, a weight that is normalised on use. So each module must be
of exactly a known class, with that class's forward, no hooks and no parametrization, and each weight a plain tensor.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn

from flatout.errors import UsageError

_TORCH = frozenset({"Linear", "Embedding", "LayerNorm", "Dropout", "ModuleList", "GELU", "ReLU", "SiLU"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where torch keeps what is called around a module's forward."""
_SHARED = frozenset({"transformers.pytorch_utils", "transformers.activations"})
"""Modules of transformers that several families take classes from."""
REMEDY = "use the model's own generate()"


def check_plain(model: nn.Module) -> None:
    """UsageError that names the first module or weight which may do something that its weights do not say."""
    family = type(model).__module__
    for name, module in model.named_modules():
        here = f"{name or 'the model'} ({type(module).__name__})"
        _check_class(here, module, family)
        if "forward" in vars(module):
            raise _not_plain(f"{here} has a forward of its own", "take it off (del module.forward)")
        for hooks in HOOKS:
            if getattr(module, hooks):
                kind = hooks.removeprefix("_forward_").replace("_", "-").removesuffix("s")
                raise _not_plain(f"{here} has a forward {kind}", "remove it while generating")
    for name, tensor in model.named_parameters():
        _check_tensor(name, tensor)


def check_all_read(model: nn.Module, read: list[Tensor]) -> None:
    """UsageError for a weight that no reader has looked at: it does something that is not known here."""
    known = {_storage(tensor) for tensor in read}
    for name, parameter in model.named_parameters():
        if _storage(parameter) not in known:
            raise _not_plain(f"the weight {name} was not expected", "take it out of the model")


def _check_class(here: str, module: nn.Module, family: str) -> None:
    kind = type(module)
    home = kind.__module__
    if hasattr(module, "parametrizations"):
        raise _not_plain(f"{here} has a parametrization", "remove it with torch.nn.utils.parametrize")
    if home.startswith("torch.nn.modules."):
        known = kind.__name__ in _TORCH
    else:
        known = home == family or home.startswith("flatout.models.") or home in _SHARED
    genuine = getattr(sys.modules.get(home), kind.__name__, None) is kind
    if not (known and genuine):
        what = f"{here} is of the class {home}.{kind.__qualname__}"
        raise _not_plain(what, "merge adapters into the weights (merge_and_unload() in peft)")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (nn.Parameter, Tensor):
        raise _not_plain(f"the weight {name} is a {type(tensor).__name__}", "load the model without quantisation")
    if not tensor.is_floating_point():
        raise _not_plain(f"the weight {name} is {tensor.dtype}", "load the model without quantisation")


def _not_plain(what: str, remedy: str) -> UsageError:
    limit = "generation here reads weights, and knows only what the model's own classes do with them"
    return UsageError(what, limit=limit, remedy=f"{remedy}, or {REMEDY}")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else id(tensor)
