"""Environment variables, read in one place: a typed function for every variable that Flatout uses.

Reading `os.environ` anywhere else is a defect: a variable that is read in twenty places cannot be listed, documented or
tested. Nothing is read at import; only `use_inductor_cache`, `show_cuda_devices`, `follow_children`,
`forget_verified_plan` and `quiet_profiler` write.

    FLATOUT_CACHE_DIR      where ceilings and builds are kept (else XDG_CACHE_HOME/flatout, else ~/.cache/flatout)
    FLATOUT_RUNS_DIR       where runs keep their state while they run (else XDG_RUNTIME_DIR, else the temporary folder)
    FLATOUT_NO_HISTORY     where it is set, a tune reads nothing of earlier ones, and leaves nothing for later ones
    CUDA_VISIBLE_DEVICES   which GPUs this process may see
    CUBLAS_WORKSPACE_CONFIG, PYTHONHASHSEED  what a deterministic run sets, where they are not set
    OMP_NUM_THREADS        threads for the CPU work of torch
    ONEDNN_MAX_CPU_ISA     the instruction set beyond which torch's CPU kernels may not go
    KINETO_LOG_LEVEL       how much torch's profiler logs of itself
    LD_PRELOAD             whether another allocator is in place already
    CUDA_HOME, CUDA_PATH   where nvcc is
    TORCH_CUDA_ARCH_LIST   the GPU architectures that CUDA sources are built for
    TORCH_EXTENSIONS_DIR   where torch itself builds extensions
    ASAN_OPTIONS           what AddressSanitizer is told, in a process of ours that runs under it
    TRITON_INTERPRET       whether Triton kernels run in Python, without a GPU
    PYTHONPATH             where a script's own modules are looked for, after its folder
    TERM                   whether the terminal can move its cursor
    _FLATOUT_FOLLOWED_INTO where processes that a script under `flatout run` starts keep their records (set by that run)
    _FLATOUT_RANKS         the folder of a run on several devices, of which this process is a rank (set by that run)
    _FLATOUT_VERIFIED_PLAN what a run has verified of a plan, for the same run where it starts over (set by that run)
    _FLATOUT_SANITIZE      extensions are built with AddressSanitizer (set for a process that runs under it)
    _FLATOUT_HEARTBEAT     the file in which a rank says how far it is (set by `flatout launch`)
    _FLATOUT_COMPLETE      a shell asks for completions of a command line
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
                           which of several processes this one is, and where they meet (set by torchrun)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from flatout.errors import UsageError


def variables() -> dict[str, str]:
    """A copy of all of them, to compare with later."""
    return dict(os.environ)


def cache_dir() -> Path:
    """The folder of Flatout's measurements. It may not exist yet."""
    own = os.environ.get("FLATOUT_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "flatout"
    try:
        return Path.home() / ".cache" / "flatout"
    except RuntimeError:  # no HOME, and the user is not in the password file, as in some containers
        return Path(tempfile.gettempdir()) / f"flatout-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def runs_dir() -> Path:
    """Where the state of each run is kept while it runs: in memory, where the system has such a folder for each user.
    It may not exist yet."""
    own = os.environ.get("FLATOUT_RUNS_DIR")
    if own:
        return Path(own)
    in_memory = os.environ.get("XDG_RUNTIME_DIR")
    if in_memory and os.path.isdir(in_memory) and os.access(in_memory, os.W_OK | os.X_OK):
        return Path(in_memory) / "flatout-runs"
    return Path(tempfile.gettempdir()) / f"flatout-runs-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def keeps_history() -> bool:
    """May a tune read what earlier ones measured, and leave what it measured itself?"""
    return not os.environ.get("FLATOUT_NO_HISTORY")


def completes_for_shell() -> bool:
    """Does a shell want completions rather than the command itself?"""
    return bool(os.environ.get("_FLATOUT_COMPLETE"))


def visible_cuda_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES; None if unset (all are visible), '' if none is visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def show_cuda_devices(setting: str) -> None:
    """Make these GPUs visible to this process, which has not initialized CUDA, and to its children."""
    os.environ["CUDA_VISIBLE_DEVICES"] = setting


def with_visible(variables: Mapping[str, str], setting: str | None) -> dict[str, str]:
    """`variables` with CUDA_VISIBLE_DEVICES as `setting`; None: without it."""
    others = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    return others if setting is None else {**others, "CUDA_VISIBLE_DEVICES": setting}


def terminal_has_cursor() -> bool:
    """Can the cursor be moved on this process's terminal, if it has one? In an editor's shell it often cannot."""
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def cuda_allocator_settings() -> str:
    """The settings of torch's CUDA allocator, by the newer variable or the older one; '' if unset."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def cublas_workspace_config() -> str:
    """The workspace that torch gives to cuBLAS (':4096:8'); '' if unset."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")


def onednn_is_limited() -> bool:
    """Is oneDNN limited to fewer instructions than the processor has?"""
    return (onednn_instruction_limit() or "DEFAULT") not in ("DEFAULT", "ALL")


def thread_variables() -> tuple[str | None, ...]:
    """The variables from which torch's libraries take their number of threads when they are loaded."""
    return tuple(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"))


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS as a number (the outermost level of a list such as '4,2'); None if unset or malformed: OpenMP
    takes a 0 for nothing."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) or None if outermost.isdecimal() else None


def onednn_instruction_limit() -> str:
    """ONEDNN_MAX_CPU_ISA (DNNL_MAX_CPU_ISA in older versions) in capitals; '' or 'DEFAULT' where nothing is limited."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()


RANKS = "_FLATOUT_RANKS"
_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""What launchers set, beside what begins with TORCHELASTIC."""
_put_aside: dict[str, str] = {}
"""Variables of a launcher that the script does not see."""


def ranks_folder() -> Path | None:
    """The folder of the run of which this process is a rank; None: it is none."""
    found = os.environ.get(RANKS) or _put_aside.get(RANKS)
    return Path(found) if found else None


def put_ranks_aside() -> None:
    """Hide a launcher's variables from this process and from what it starts; the functions here still know them."""
    for name in [one for one in os.environ if one in (*_LAUNCHERS, RANKS) or one.startswith("TORCHELASTIC")]:
        _put_aside[name] = os.environ.pop(name)


@contextlib.contextmanager
def ranks_shown() -> Iterator[None]:
    """For torch, which finds the other ranks by the variables that were put aside."""
    os.environ.update(_put_aside)
    try:
        yield
    finally:
        put_ranks_aside()


def ranks_variables(folder: Path) -> dict[str, str]:
    """Of the ranks of a run: its folder, and one order of hashes, which may order data."""
    order = os.environ.get("PYTHONHASHSEED")
    return {RANKS: str(folder), "PYTHONHASHSEED": "0" if order in (None, "", "random") else str(order)}


def rank() -> int | None:
    """RANK as set by torchrun; None in a process that is not one of several."""
    return _number("RANK")


def world_size() -> int | None:
    """WORLD_SIZE as set by torchrun: how many ranks there are on all machines."""
    return _number("WORLD_SIZE")


def local_rank() -> int | None:
    """LOCAL_RANK as set by torchrun: the number of this process on this machine."""
    return _number("LOCAL_RANK")


def local_world_size() -> int | None:
    """LOCAL_WORLD_SIZE as set by torchrun: how many of the ranks are on this machine."""
    return _number("LOCAL_WORLD_SIZE")


def launched() -> tuple[int, int] | None:
    """(rank, of how many), as a launcher has set them; None where none has.

    Raises UsageError where some of its variables are missing or malformed.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in needed if os.environ.get(name)]
    if "RANK" not in given and (_number("WORLD_SIZE") or 1) == 1:
        return None
    if len(given) < len(needed):
        raise UsageError(
            f"{' and '.join(given)} set, but not {' and '.join(name for name in needed if name not in given)}",
            limit="a launcher sets all of them",
            remedy="start with: flatout launch train.py, or unset them",
        )
    this, count = _number("RANK"), _number("WORLD_SIZE")
    if this is None or count is None or this >= count:
        raise UsageError(
            f"RANK is {os.environ['RANK']!r} and WORLD_SIZE {os.environ['WORLD_SIZE']!r}",
            limit="they are whole numbers, and ranks are numbered from 0",
            remedy="start with: flatout launch train.py, or unset them",
        )
    return this, count


def started_together() -> tuple[str, int] | None:
    """(variable, number) by which srun or mpirun says that it has started several of this process; None for one, and
    where a launcher's variables were put aside.

    SLURM_NTASKS is also set in a batch script, which runs once.
    """
    if _put_aside:
        return None
    named = ((name, _number(name)) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return next(((name, count) for name, count in named if count is not None and count > 1), None)


def _number(name: str) -> int | None:
    text = os.environ.get(name) or _put_aside.get(name, "")
    return int(text) if text.isdecimal() else None


def cpp_compiler() -> str:
    """The C++ compiler that torch.compile will call: CXX, else g++."""
    return os.environ.get("CXX", "").strip() or "g++"


def cuda_home() -> str:
    """The folder of the CUDA toolkit that the user names; '' if none is named."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH", "")


def cuda_architectures() -> str:
    """TORCH_CUDA_ARCH_LIST; '' if unset: the architectures of the GPUs that are here."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")


def torch_extensions_dir() -> Path:
    """Where `torch.utils.cpp_extension.load` builds, and leaves its lock files."""
    own, shared = os.environ.get("TORCH_EXTENSIONS_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(shared or os.path.expanduser("~/.cache")) / "torch_extensions"


def sanitizes_extensions() -> bool:
    """Does this process run under AddressSanitizer, so that extensions are to be built with it?"""
    return bool(os.environ.get("_FLATOUT_SANITIZE"))


def kernel_environment(*, interprets_triton: bool, sanitizer: str | None = None) -> dict[str, str]:
    """Of the process that checks a user's kernel. sanitizer: the library of AddressSanitizer, to run under it."""
    found = {**os.environ, **inductor_cache()}
    if interprets_triton:
        found = {"TRITON_INTERPRET": "1", **found}
    if sanitizer is None:
        return found
    told = ":".join(part for part in (os.environ.get("ASAN_OPTIONS", ""), "detect_leaks=0") if part)
    preloaded = " ".join(part for part in (sanitizer, preloaded_libraries()) if part)
    return {**found, "LD_PRELOAD": preloaded, "ASAN_OPTIONS": told, "_FLATOUT_SANITIZE": "1"}


DETERMINISTIC = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""A fixed order of sets of strings; a cuBLAS whose results do not depend on what else runs."""


def deterministic_variables() -> dict[str, str]:
    """The same, except for those that the user has set."""
    given = {name: value for name in DETERMINISTIC if (value := os.environ.get(name)) and value != "random"}
    return {**DETERMINISTIC, **given}


def deterministic_environment() -> dict[str, str] | None:
    """The environment of a deterministic run; None if this process has it.

    Hash randomization is decided when Python starts: a process with another setting has to be restarted.
    """
    needed = {**os.environ, **deterministic_variables()}
    return None if needed == dict(os.environ) else needed


def trial_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a trial: ours, with `changes`, a fixed hash order, and nothing sent to tracking services."""
    fixed = {"WANDB_MODE": "offline"}
    order = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    return {**os.environ, **fixed, **order, **inductor_cache(), **changes}


def inductor_folder() -> Path:
    """Where torch.compile caches its output: the user's choice, else our cache, so that a run finds that of a trial."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir() / "inductor")


def compiled_headers() -> Path:
    """Where torch.compile keeps the precompiled headers of its kernels."""
    return inductor_folder() / "precompiled_headers"


def headers_are_compiled() -> bool:
    """Are there any, for any version of torch and compiler?"""
    return any(compiled_headers().rglob("*.gch"))


def inductor_cache() -> dict[str, str]:
    """The variable that sets this folder for torch.compile; none where it cannot be made: torch makes it with the first
    optimizer, and fails there, or has one of its own."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return {"TORCHINDUCTOR_CACHE_DIR": str(inductor_folder())} if given or takes_files(inductor_folder()) else {}


def takes_files(folder: Path) -> bool:
    """Is it there, or can it be made, and may this user write there?"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def python_path() -> list[str]:
    """The folders of PYTHONPATH."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def preloaded_libraries() -> str:
    """LD_PRELOAD; '' if nothing is preloaded."""
    return os.environ.get("LD_PRELOAD", "")


def use_inductor_cache() -> None:
    """Let this process, which is about to run the user's script, find what trials compiled."""
    os.environ.update(inductor_cache())


def with_preloaded(library: str) -> dict[str, str]:
    """This environment with `library` preloaded before the libraries that are preloaded already."""
    return {**os.environ, "LD_PRELOAD": " ".join(part for part in (library, preloaded_libraries()) if part)}


VERIFIED_PLAN = "_FLATOUT_VERIFIED_PLAN"


def verified_plan() -> str | None:
    """What this run has verified of its plan, before it started over; None: it has not."""
    return os.environ.get(VERIFIED_PLAN)


def forget_verified_plan() -> None:
    """The script does not see it."""
    os.environ.pop(VERIFIED_PLAN, None)


_PROFILERS_LOG_LEVEL = "KINETO_LOG_LEVEL"
_NOTHING_LOGGED = "6"


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Within, torch's profiler does not log that it starts and stops, unless the user has set how much it logs. It
    reads the variable when it is used for the first time."""
    if _PROFILERS_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_PROFILERS_LOG_LEVEL] = _NOTHING_LOGGED
    try:
        yield
    finally:
        os.environ.pop(_PROFILERS_LOG_LEVEL, None)


FOLLOWED_INTO = "_FLATOUT_FOLLOWED_INTO"


def follow_children(hook: str, folder: str) -> None:
    """Processes started from now on find the folder `hook` first on PYTHONPATH, and `folder` in a variable of ours.
    What this process itself reads of its environment stays the same: `os.environ` is a copy."""
    os.putenv("PYTHONPATH", _after(hook, os.environ.get("PYTHONPATH", "")))
    os.putenv(FOLLOWED_INTO, folder)


def with_following(given: Mapping[str, str], hook: str, folder: str) -> dict[str, str]:
    """The same for an environment that a script gives a process, as torchrun does: it was made from that copy."""
    if given.get(FOLLOWED_INTO):
        return dict(given)
    return {**given, "PYTHONPATH": _after(hook, given.get("PYTHONPATH", "")), FOLLOWED_INTO: folder}


def _after(hook: str, path: str) -> str:
    """PYTHONPATH with this folder first; the rest as it is, as an empty entry means the current folder."""
    return os.pathsep.join([hook, path]) if path else hook


def followed_into() -> str | None:
    """Where this process is to keep its record; None: nobody follows it."""
    return os.environ.get(FOLLOWED_INTO) or None


HEARTBEAT = "_FLATOUT_HEARTBEAT"


def heartbeat_file() -> Path | None:
    """Where this process is to say how far it is; None: nobody asks."""
    own = os.environ.get(HEARTBEAT)
    return Path(own) if own else None


def rank_environment(changes: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: ours, with `changes`, and with `defaults` where the user has set nothing."""
    return {**defaults, **os.environ, **changes}
