"""An optimizer's state: compared with the optimizer before it is loaded, and loaded without torch's conversions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flatout.checkpoint.differences import Findings
from flatout.checkpoint.parts import spread_like
from flatout.errors import UsageError
from flatout.levers.low_bit import without_codes
from flatout.parallel.whole_tensors import whole_shape
from flatout.parameters import Saved, parameters_of

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed, not what: the optimizer here keeps its own."""
DECOUPLED = "decoupled_weight_decay"
"""What tells AdamW from Adam, which have the same options and state otherwise; the optimizer here keeps its own."""
KIND = "kind"
"""In a saved state, which of torch's optimizers it is: the options and states of some differ in nothing."""
_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)
"""State of torch's optimizers that has its parameter's shape."""
_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"})
"""What learning rate schedulers put into the groups."""


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """state_dict without codes: the run that resumes may hold the moments in 8 bits, or not; and with its kind."""
    return {**without_codes(optimizer.state_dict()), KIND: _kind(optimizer)}


def check_optimizer(path: str, optimizer: torch.optim.Optimizer, saved: object, found: Findings) -> Saved:
    """Note what differs; returns the saved state, with the optimizer's own in place of what does not fit.

    Raises UsageError if it is not one of as many parameters.
    """
    groups = optimizer.param_groups
    try:
        if not isinstance(saved, Mapping):
            raise TypeError(f"it is a {type(saved).__name__}")
        counts = [len(group["params"]) for group in saved["param_groups"]]
        states = dict(saved["state"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is not saved as an optimizer's state", remedy="pass what was saved") from error
    own = [len(group["params"]) for group in groups]
    if counts != own:
        what = f"{path} was saved with {_sizes(counts)}"
        limit = f"the optimizer here has {_sizes(own)}"
        raise UsageError(what, limit=limit, remedy="build it over the same parameters in the same groups")
    options, is_other = len(found.unexpected), False
    for index, (group, there) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        lacking = [key for key in optimizer.defaults if key not in there]
        unknown = [key for key in there if key not in group and key not in _SCHEDULERS]
        if lacking and unknown:  # either alone is another version of torch, both are another optimizer
            is_other = True
            found.missing += [f"{path}: group {index}: {key}" for key in lacking]
            found.unexpected += [f"{path}: group {index}: {key}" for key in unknown]
        if DECOUPLED in there and DECOUPLED in group and there[DECOUPLED] != group[DECOUPLED]:
            values = f"{there[DECOUPLED]} saved, {group[DECOUPLED]} here"
            found.unexpected.append(f"{path}: group {index}: {DECOUPLED} ({values})")
    kinds = saved.get(KIND), _kind(optimizer)
    is_other = is_other or (all(kinds) and kinds[0] != kinds[1])
    if is_other and len(found.unexpected) == options:  # they have the same options
        found.unexpected.append(f"{path}: the state of another optimizer ({kinds[0]} saved, {kinds[1]} here)")
    misfits = []
    for number, (identity, parameter) in enumerate(_parameters(optimizer, saved)):
        wrong = _wrong_shapes(states.get(identity), whole_shape(parameter))
        found.shapes += [f"{path}: {key} of parameter {number} ({shapes})" for key, shapes in wrong]
        if wrong or is_other:
            misfits.append((number, identity))
    here: Saved = without_codes(optimizer.state_dict()) if misfits else {}
    for number, identity in misfits:
        states.pop(identity, None)
        if number in here["state"]:
            states[identity] = here["state"][number]
    return {**saved, "state": states}


def _wrong_shapes(entry: object, whole: tuple[int, ...]) -> list[tuple[str, str]]:
    """(name, shapes) of what is saved of one parameter and has another shape than it. A scalar of that name is none:
    optimizers that are not torch's keep such ones."""
    if not isinstance(entry, Mapping):
        return []
    return [
        (key, f"{list(value.shape)} saved, {list(whole)} here")
        for key, value in entry.items()
        if key in _LIKE_PARAMETER and isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) != whole
    ]


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Saved, *, exact_dtypes: bool) -> None:
    """load_state_dict, but from copies, with the optimizer's own implementation, and with the dtypes that were saved.

    torch converts state to its parameter's dtype: fp32 moments of bf16 weights would lose their last bits.
    """
    devices = {parameter.device for parameter in parameters_of(optimizer)}
    parameters = dict(_parameters(optimizer, saved))

    def copied(identity: object, value: object) -> object:
        if isinstance(value, Mapping):
            return {key: copied(identity, one) for key, one in value.items()}
        return spread_like(parameters.get(identity), _own(value, devices))

    states = {identity: copied(identity, entry) for identity, entry in saved["state"].items()}
    groups = [
        {key: _option(key, value, group, devices) for key, value in there.items()}
        | {key: group[key] for key in optimizer.defaults if key in group and key not in there}
        for group, there in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
    if exact_dtypes:
        for identity, parameter in _parameters(optimizer, saved):
            there = states.get(identity)
            if isinstance(there, Mapping):
                _keep_dtypes(optimizer.state.get(parameter, {}), there)


def _keep_dtypes(here: dict[str, object], there: Mapping[str, object]) -> None:
    for key, value in there.items():
        own = here.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and key != "step":
            here[key] = own if own.dtype == value.dtype else value.to(own.device)


def _option(key: str, value: object, group: Mapping[str, object], devices: set[torch.device]) -> object:
    own = group.get(key)
    if key in (*IMPLEMENTATION, DECOUPLED) and key in group:
        return own
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):  # a learning rate that lives on the device
        return value.to(own.device, copy=True)
    return _own(value, devices)


def _own(value: object, devices: set[torch.device]) -> object:
    """A tensor that the optimizer may change: a copy, unless going to its parameter's device makes one anyway."""
    if isinstance(value, torch.Tensor) and (value.device in devices or value.ndim == 0):
        return value.clone(memory_format=torch.preserve_format)
    return value


def _parameters(optimizer: torch.optim.Optimizer, saved: Saved) -> list[tuple[object, torch.Tensor]]:
    """(the number it was saved under, parameter), in order."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    return list(zip(numbers, parameters_of(optimizer), strict=True))


def _kind(optimizer: object) -> str:
    """The class of torch that it is, or is derived from; '' for one of another package. AdamW is an Adam."""
    found = [one.__name__ for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim.")]
    return found[-2] if len(found) > 1 else ""


def _sizes(counts: list[int]) -> str:
    return f"{len(counts)} group{'s' * (len(counts) != 1)} of {', '.join(map(str, counts))} parameters"
