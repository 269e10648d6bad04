"""The environment, read in one place: a typed function for every variable that Flatout heeds.

Reading `os.environ` anywhere else is a defect: a variable that steers a program from twenty places cannot be listed,
documented or tested. Nothing is read at import; only `use_inductor_cache` and `show_cuda_devices` write.

    FLATOUT_CACHE_DIR      where ceilings and builds are kept (else XDG_CACHE_HOME/flatout, else ~/.cache/flatout)
    FLATOUT_NO_HISTORY     where it is set, a tune reads nothing of earlier ones, and leaves nothing for later ones
    CUDA_VISIBLE_DEVICES   which GPUs this process may see
    CUBLAS_WORKSPACE_CONFIG, PYTHONHASHSEED  what a deterministic run sets, where they are not set
    OMP_NUM_THREADS        threads for the CPU work of torch
    ONEDNN_MAX_CPU_ISA     the instruction set beyond which torch's CPU kernels may not go
    LD_PRELOAD             whether another allocator is in place already
    _FLATOUT_COMPLETE      a shell asks for completions of a command line
    RANK                   which of several processes this one is (set by torchrun)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def variables() -> dict[str, str]:
    """All of them as they stand, to be compared with later."""
    return dict(os.environ)


def cache_dir() -> Path:
    """Where Flatout keeps what it measured. It may not exist yet."""
    own = os.environ.get("FLATOUT_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "flatout"
    try:
        return Path.home() / ".cache" / "flatout"
    except RuntimeError:  # no HOME, and the user is not in the password file: containers run so
        return Path(tempfile.gettempdir()) / f"flatout-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def keeps_history() -> bool:
    """May a tune read what earlier ones measured, and leave what it measured itself?"""
    return not os.environ.get("FLATOUT_NO_HISTORY")


def completes_for_shell() -> bool:
    """Does a shell want completions rather than the command itself?"""
    return bool(os.environ.get("_FLATOUT_COMPLETE"))


def visible_cuda_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it stands; None if unset (all are visible), '' if none is to be seen."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def show_cuda_devices(setting: str) -> None:
    """Let this process, which has not started CUDA, and those that it starts, see these GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = setting


def with_visible(variables: Mapping[str, str], setting: str | None) -> dict[str, str]:
    """`variables` with CUDA_VISIBLE_DEVICES as `setting`; None: without it."""
    others = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    return others if setting is None else {**others, "CUDA_VISIBLE_DEVICES": setting}


def cuda_allocator_settings() -> str:
    """What torch's CUDA allocator is told, by its newer name or its older one; '' if nothing."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def cublas_workspace_config() -> str:
    """What torch gives to cuBLAS as its workspace (':4096:8'); '' if nothing is said."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")


def onednn_is_limited() -> bool:
    """Is oneDNN told to use fewer instructions than the processor has?"""
    told = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    return told.upper() not in ("DEFAULT", "ALL")


def thread_variables() -> tuple[str | None, ...]:
    """The variables from which torch's libraries take their number of threads as they load."""
    return tuple(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"))


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS as a number (the outermost level of a list such as '4,2'); None if unset or malformed."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() else None


def onednn_instruction_limit() -> str:
    """ONEDNN_MAX_CPU_ISA (DNNL_MAX_CPU_ISA in older versions) in capitals; '' or 'DEFAULT' where nothing is limited."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()


def rank() -> int | None:
    """RANK as torchrun sets it; None in a process that is not one of several."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile will call: CXX, else g++."""
    return os.environ.get("CXX") or "g++"


DETERMINISTIC = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The order of sets and dictionaries of texts; a cuBLAS whose products do not depend on what else runs."""


def deterministic_variables() -> dict[str, str]:
    """The same, what the user set left as it is."""
    given = {name: value for name in DETERMINISTIC if (value := os.environ.get(name)) and value != "random"}
    return {**DETERMINISTIC, **given}


def deterministic_environment() -> dict[str, str] | None:
    """The environment of a deterministic run; None where this process has it.

    The order of hashes is fixed when Python starts: a process without it has to be started again.
    """
    needed = {**os.environ, **deterministic_variables()}
    return None if needed == dict(os.environ) else needed


def trial_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a trial: ours, with `changes`, a fixed hash order, and nothing sent to tracking services."""
    fixed = {"WANDB_MODE": "offline"}
    order = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    return {**os.environ, **fixed, **order, **inductor_cache(), **changes}


def inductor_folder() -> Path:
    """Where torch.compile keeps its products: the user's own choice, else our cache, so that a run finds a trial's."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir() / "inductor")


def compiled_headers() -> Path:
    """Where torch.compile keeps the headers of its kernels, compiled once for all of them."""
    return inductor_folder() / "precompiled_headers"


def headers_are_compiled() -> bool:
    """Are any there, of whatever version of torch and compiler?"""
    return any(compiled_headers().rglob("*.gch"))


def inductor_cache() -> dict[str, str]:
    """The variable that tells torch.compile so."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(inductor_folder())}


def preloaded_libraries() -> str:
    """LD_PRELOAD as it stands; '' if nothing is preloaded."""
    return os.environ.get("LD_PRELOAD", "")


def use_inductor_cache() -> None:
    """Let this process, which is about to become the user's script, find what trials compiled."""
    os.environ.update(inductor_cache())


def with_preloaded(library: str) -> dict[str, str]:
    """This environment with `library` preloaded before what is preloaded already."""
    return {**os.environ, "LD_PRELOAD": " ".join(part for part in (library, preloaded_libraries()) if part)}
