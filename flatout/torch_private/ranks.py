"""The store shared by all ranks of torch.distributed, and the parts of its tensors. Importing this imports it.

`init_process_group` creates it without exposing it; a second store would need its own address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.torch_private.lookup import Private, private

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

local_shape_and_offset: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]] = private(
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
)
"""(shape, device mesh, placements) -> this rank's (shape, where it begins in the whole)."""

pretended_store: Callable[[], Store] = private("torch.testing._internal.distributed.fake_pg.FakeStore")
"""For the process group "fake", whose collectives move nothing; importing it registers that group."""

default_store: Callable[[], Store] = private("torch.distributed.distributed_c10d._get_default_store")


_pipelining = "torch.distributed.pipelining"


def as_voted(schedule: object) -> None:
    """Have the stages of a pipeline schedule take the shapes that they were given, without asking the other ranks,
    which are pretended. Torch 2.13 sends and reads numbers to find out that all have them; 2.15 asks nobody then."""
    if hasattr(schedule, "_warmup_p2p"):

        def warm_up(stages: Iterable[Private], *_: object) -> None:
            for stage in stages:
                stage._inference_mode = private(f"{_pipelining}._utils.InferenceMode").STATIC

        schedule._warmup_p2p = warm_up


def gloo_works() -> bool:
    """Is one of gloo's threads in this process running, or about to? False where the system does not show threads.

    Theirs are named "pt_gloo_runloop" (torch 2.13).
    """
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop" and rest.split()[0] != "S":
                return True
    return False
