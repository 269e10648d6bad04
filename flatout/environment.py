"""The environment, read in one place: a typed function for every variable that Flatout heeds.

Reading `os.environ` anywhere else is a defect: a variable that steers a program from twenty places cannot be listed,
documented or tested. Nothing is read at import; nothing is ever written here.

    FLATOUT_CACHE_DIR      where measured ceilings are kept (else XDG_CACHE_HOME/flatout, else ~/.cache/flatout)
    CUDA_VISIBLE_DEVICES   which GPUs this process may see
    OMP_NUM_THREADS        threads for the CPU work of torch
    RANK                   which of several processes this one is (set by torchrun)
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where Flatout keeps what it measured. It may not exist yet."""
    own = os.environ.get("FLATOUT_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "flatout"


def visible_cuda_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it stands; None if unset (all are visible), '' if none is to be seen."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS as a number (the outermost level of a list such as '4,2'); None if unset or malformed."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() else None


def rank() -> int | None:
    """RANK as torchrun sets it; None in a process that is not one of several."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile will call: CXX, else g++."""
    return os.environ.get("CXX") or "g++"


def trial_base_environment() -> dict[str, str]:
    """A copy of the whole environment, for a child process to start from."""
    return dict(os.environ)
