"""From live objects to a state: one nested dict, which `Checkpoints.save` stores and `restore` puts back.

{"model": ..., "optimizer": ..., "scheduler": ..., "scaler": ..., "data": ..., "plan": TOML, "extra": ...,
 "generators": ...}          a section that was not given is not there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.checkpoint.model_names import plain_names
from flatout.checkpoint.optimizers import plain_state
from flatout.checkpoint.rank_generators import states_of_ranks
from flatout.errors import UsageError
from flatout.plan import Plan


def capture(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    plan: Plan | None = None,
    extra: Any = None,
) -> dict[str, Any]:
    """The state of a run, with that of every random number generator, on every rank.

    Where torch.distributed runs, call it on all ranks, equally often: each gives its random states, and rank 0, whose
    state is the one to save, waits for them. If one does not come within 300 s, rank 0 raises UsageError naming it.

    Each of model, optimizer, scheduler, scaler and data (where the run stands in its data) is an object with
    state_dict(), or a list or dict of such. `extra` is any nested value of the user's. Tensors are the live ones, not
    copies: save the state before the next step (moments held in 8 bits are given as fp32 copies). Raises UsageError for
    an object without state_dict().
    """
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "data": data}
    state = {name: _each(live, name, _state_of) for name, live in given.items() if live is not None}
    if plan is not None:
        state["plan"] = plan.to_toml()
    if extra is not None:
        state["extra"] = extra
    state["generators"] = states_of_ranks()
    return state


def _each(live: Any, path: str, take: Callable[[Any, str], Any]) -> Any:
    if isinstance(live, list | tuple):
        return [_each(one, f"{path}[{index}]", take) for index, one in enumerate(live)]
    if isinstance(live, Mapping):
        return {key: _each(one, f"{path}[{key!r}]", take) for key, one in live.items()}
    return take(live, path)


def _state_of(live: Any, path: str) -> Any:
    if not callable(getattr(live, "state_dict", None)):
        limit = "it must have state_dict() and load_state_dict()"
        raise UsageError(f"{path} is a {type(live).__name__}", limit=limit, remedy="store plain values in extra=")
    if isinstance(live, torch.nn.Module):
        plain = plain_names(live)
        return {plain(name): value for name, value in live.state_dict().items()}
    if isinstance(live, torch.optim.Optimizer):
        return plain_state(live)
    return live.state_dict()
