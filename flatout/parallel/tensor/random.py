"""Random numbers of ranks that compute one model together.

What all ranks have (the output of a block, say) needs the same dropout on all of them: each step begins with rank 0's
random states. What each rank computes by itself (the weights of its heads) needs another one on each: a number is drawn
from the common stream, and with the rank it seeds a stream of its own. A recomputation in the backward pass, which
begins with the states of the forward pass, draws the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from flatout.torch_private.dispatch import disable_current_modes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flatout.parallel.tensor.parts import Across

_SEEDS = 2**62


class OwnStream:
    """From `begin` to `end`, numbers for a device come from a stream of this rank's own."""

    def __init__(self, across: Across) -> None:
        self._across = across
        self._common: tuple[torch.Generator, Tensor] | None = None

    def __deepcopy__(self, memo: object) -> OwnStream:
        return OwnStream(self._across)  # of a copied model; nothing is under way while a model is copied

    def begin(self, device: torch.device) -> None:
        with disable_current_modes():  # a number in a forecast too
            seed = int(torch.randint(_SEEDS, ()))  # on the CPU also for a GPU: nothing waits
        generator = _generator(device)
        self._common = generator, generator.get_state()
        generator.manual_seed((seed + self._across.rank) % _SEEDS)

    def end(self, *_: object) -> None:
        """The common stream goes on where it was. Also a hook after a module, called where that has failed too."""
        if self._common is not None:
            generator, state = self._common
            self._common = None
            generator.set_state(state)


def same_random_states(device: torch.device, group: ProcessGroup) -> None:
    """Give all ranks rank 0's random states: of the CPU, and of `device`. A collective of 5 KB."""
    # without a CPU backend, as where the user began NCCL alone, they go over the device, and the host waits for it
    over_cpu = device.type == "cpu" or "cpu:" in distributed.get_backend_config(group)
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(_generator(device))
    for generator in generators:
        state = generator.get_state()
        sent = state if over_cpu else state.to(device)
        distributed.broadcast(sent, distributed.get_global_rank(group, 0), group=group)
        if group.rank() != 0:
            generator.set_state(sent.cpu())


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        every: Any = torch.cuda.default_generators  # torch does not type it
        found: torch.Generator = every[torch.cuda.current_device() if device.index is None else device.index]
        return found
    return torch.default_generator
