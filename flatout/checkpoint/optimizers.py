"""An optimizer's state: compared with the optimizer before it is loaded, and loaded without torch's liberties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flatout.checkpoint.differences import Findings
from flatout.errors import UsageError
from flatout.levers.low_bit import without_codes

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed, not what: the optimizer here keeps its own."""
_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
)
"""State of torch's optimizers that has its parameter's shape."""
_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"})
"""What learning rate schedulers put into the groups."""


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """state_dict without codes: whoever resumes may hold the moments in 8 bits, or not."""
    return without_codes(optimizer.state_dict())


def check_optimizer(path: str, optimizer: torch.optim.Optimizer, saved: Any, found: Findings) -> None:
    """Note what differs. Raises UsageError if the saved state is none of an optimizer over as many parameters."""
    groups = optimizer.param_groups
    try:
        counts = [len(group["params"]) for group in saved["param_groups"]]
        states = dict(saved["state"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is not saved as an optimizer's state", remedy="pass what was saved") from error
    own = [len(group["params"]) for group in groups]
    if counts != own:
        what = f"{path} was saved with {_sizes(counts)}"
        limit = f"the optimizer here has {_sizes(own)}"
        raise UsageError(what, limit=limit, remedy="build it over the same parameters in the same groups")
    for index, (group, there) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        lacking = [key for key in optimizer.defaults if key not in there]
        foreign = [key for key in there if key not in group and key not in _SCHEDULERS]
        if lacking and foreign:  # either alone is another version of torch, both are another optimizer
            found.missing += [f"{path}: group {index}: {key}" for key in lacking]
            found.unexpected += [f"{path}: group {index}: {key}" for key in foreign]
    for number, (identity, parameter) in enumerate(_parameters(optimizer, saved)):
        for key, value in states.get(identity, {}).items():
            if key in _LIKE_PARAMETER and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                shapes = f"{list(value.shape)} saved, {list(parameter.shape)} here"
                found.shapes.append(f"{path}: {key} of parameter {number} ({shapes})")


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, exact_dtypes: bool) -> None:
    """load_state_dict, but from copies, with the optimizer's own implementation, and with the dtypes that were saved.

    torch converts state to its parameter's dtype: fp32 moments of bf16 weights would lose their last bits.
    """
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    states = {
        identity: {key: _own(value, devices) for key, value in entry.items()} if isinstance(entry, Mapping) else entry
        for identity, entry in saved["state"].items()
    }
    groups = [
        {key: _option(key, value, group, devices) for key, value in there.items()}
        for group, there in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
    if exact_dtypes:
        for identity, parameter in _parameters(optimizer, saved):
            _keep_dtypes(optimizer.state.get(parameter, {}), states.get(identity, {}))


def _keep_dtypes(here: dict[str, Any], there: Mapping[str, Any]) -> None:
    for key, value in there.items():
        own = here.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and key != "step":
            here[key] = own if own.dtype == value.dtype else value.to(own.device)


def _option(key: str, value: Any, group: Mapping[str, Any], devices: set[torch.device]) -> Any:
    own = group.get(key)
    if key in IMPLEMENTATION and key in group:
        return own
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):  # a learning rate that lives on the device
        return value.to(own.device, copy=True)
    return _own(value, devices)


def _own(value: Any, devices: set[torch.device]) -> Any:
    """A tensor that the optimizer may change: a copy, unless going to its parameter's device makes one anyway."""
    if isinstance(value, torch.Tensor) and (value.device in devices or value.ndim == 0):
        return value.clone(memory_format=torch.preserve_format)
    return value


def _parameters(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """(the number it was saved under, parameter), in order."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters, strict=True))


def _sizes(counts: list[int]) -> str:
    return f"{len(counts)} group{'s' * (len(counts) != 1)} of {', '.join(map(str, counts))} parameters"
