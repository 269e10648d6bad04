"""What several ranks that train one model have to agree on."""

from __future__ import annotations

from typing import Any


def ranks_of(model: Any) -> int:
    """Over how many ranks the model averages its gradients: 1 unless it is wrapped by DDP."""
    import torch

    parallel = torch.nn.parallel.DistributedDataParallel
    return model.process_group.size() if isinstance(model, parallel) else 1


def mean_over_ranks(value: Any, device: Any) -> Any:
    """The mean of a number over all ranks, a tensor on `device`; does not wait for the device."""
    import torch
    from torch import distributed

    total = torch.as_tensor(value, dtype=torch.float32, device=device).clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
