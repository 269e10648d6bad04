"""What usually breaks a build, found before it where possible, else in what the compiler or the loader says."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flatout import environment
from flatout.errors import MachineError, UsageError

NVCC_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why it most likely failed."""

    what: str
    remedy: str


# before a build


def nvcc_command(torch_cuda: str | None) -> list[str]:
    """nvcc of the CUDA version that torch was built with. MachineError: torch or the toolkit lacks it."""
    if torch_cuda is None:
        remedy = "install one with the lines of: flatout check --install pip"
        raise MachineError("torch is a build for the CPU", limit="a .cu file needs a build with CUDA", remedy=remedy)
    nvcc = _nvcc()
    if nvcc is None:
        remedy = f"install the CUDA toolkit {torch_cuda}, or name its folder in CUDA_HOME"
        raise MachineError("there is no nvcc", limit="a .cu file is compiled by it", remedy=remedy)
    found = nvcc_version(nvcc)
    if found is not None and found.partition(".")[0] != torch_cuda.partition(".")[0]:
        remedy = f"install the toolkit {torch_cuda} and set CUDA_HOME, or a torch for CUDA {found}"
        raise MachineError(f"{nvcc} is CUDA {found}", limit=f"torch was built with CUDA {torch_cuda}", remedy=remedy)
    return [nvcc]


def _nvcc() -> str | None:
    home = environment.cuda_home()
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        return str(nvcc) if nvcc.is_file() else None
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def nvcc_version(nvcc: str) -> str | None:
    """'13.0'; None: it does not say."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=NVCC_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else None


def architecture_flags(listed: str, capabilities: Sequence[tuple[int, int]]) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST ('8.0;9.0+PTX'), or for the devices here where it is empty.

    UsageError: the list has something else, or runs on none of the devices.
    """
    wanted = [one for one in re.split(r"[; ]+", listed.strip()) if one and one != "native"]
    if not wanted:
        return [_gencode(f"{major}{minor}") for major, minor in dict.fromkeys(capabilities)]
    flags, numbers = [], []
    for one in wanted:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", one)
        if match is None:
            limit = "it is a list such as '8.0;9.0+PTX'"
            raise UsageError(f"TORCH_CUDA_ARCH_LIST has {one!r}", limit=limit, remedy="unset it, to build for this GPU")
        number = f"{match[1]}{match[2]}{match[3]}"
        flags.append(_gencode(number))
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        numbers.append((int(match[1]), int(match[2]), bool(match[4])))
    for major, minor in capabilities:
        if not any(_runs_on(one, (major, minor)) for one in numbers):
            limit = f"this GPU has compute capability {major}.{minor}"
            remedy = f"add {major}.{minor} to it, or unset it to build for this GPU"
            raise UsageError(f"TORCH_CUDA_ARCH_LIST is {listed!r}", limit=limit, remedy=remedy)
    return flags


def _gencode(number: str) -> str:
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _runs_on(built: tuple[int, int, bool], device: tuple[int, int]) -> bool:
    """Machine code runs on later minor versions of its major one, PTX on all later ones."""
    major, minor, ptx = built
    return (major == device[0] and minor <= device[1]) or (ptx and (major, minor) <= device)


# after a build that failed

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"Python\.h: No such file",
        "Python's headers are not installed",
        "apt install python3-dev (or the package for your Python)",
    ),
    (
        r"cuda_cmake_macros\.h: No such file|fatal error: (?:ATen|c10)/cuda/\S+: No such file",
        "a header of torch's CUDA build is included, and this torch has none",
        "build it with a CUDA build of torch, or include it only where USE_CUDA is defined",
    ),
    (
        r"fatal error: (cuda\w*|cublas\w*|cudnn\w*|curand\w*|nv\w+)\S*\.h: No such file",
        "a header of the CUDA toolkit is missing",
        "install the toolkit and set CUDA_HOME, or pass its folder in include_dirs",
    ),
    (
        r"fatal error: '?(?P<name>\S+?)'?(?:: No such file| file not found)",
        "the header {name} is not where the compiler looks",
        "pass its folder in include_dirs=[...], or install its package",
    ),
    (
        r"unsupported GNU version|host compiler .* not supported|unsupported clang version",
        "this nvcc does not work with a C++ compiler as new as this one",
        "name an older compiler in CXX, or install a newer CUDA toolkit",
    ),
    (
        r"Unsupported gpu architecture '(?P<name>\w+)'|Value '(?P<other>sm_\w+)' is not defined",
        "this nvcc does not know the architecture {name}",
        "install a newer CUDA toolkit, or change TORCH_CUDA_ARCH_LIST",
    ),
    (
        r"#error.*C\+\+(?:17|20)|requires at least C\+\+|C\+\+(?:17|20) or later",
        "the headers need a newer C++ than the flags ask for",
        "leave -std=... out of cxx_flags, or install a newer compiler",
    ),
    (
        r"cannot find -l(?P<name>\S+)",
        "the linker does not find the library {name}",
        "install it, or pass its folder: link_flags=['-L/folder']",
    ),
    (
        r"undefined reference to `?(?P<name>[^'\n]+)'?",
        "{name} is declared, but no source defines it",
        "pass the source that defines it too, or link its library with link_flags",
    ),
    (r"No space left on device", "the disk is full", "free up space, or set FLATOUT_CACHE_DIR to another disk"),
    (
        r"Killed signal terminated program|virtual memory exhausted|cannot allocate memory",
        "the compiler ran out of memory",
        "include less (ATen/core/Tensor.h and torch/library.h in place of torch/extension.h)",
    ),
    (
        r"[‘'](?:const )?(?:struct |class )?(?:at|c10|torch)::[^’']*[’'] has no member"
        r"|is not a member of [‘'](?:at|c10|torch)|no member named .* in (?:namespace )?'(?:at|c10|torch)",
        "torch {torch} has no such function: it may have had another name in the version that this was written for",
        "look it up in the headers of this torch",
    ),
    (
        r"no match for call to|no matching function|cannot convert|could not convert|invalid conversion",
        "a call does not fit the function's types",
        "see the candidates in the whole output",
    ),
    (
        r"was not declared in this scope|use of undeclared identifier|has not been declared|does not name a type",
        "a name is not declared: misspelt, or its header is not included",
        "include its header",
    ),
    (r"expected .* before|expected ['‘;]", "a syntax error", "correct the line"),
)
_ERROR_LINE = re.compile(
    r"^.*?(?:(?::\d+){1,2}: (?:fatal )?error:|\(\d+\): (?:fatal )?error\b"
    r"|nvcc fatal|undefined reference to|cannot find -l).*$",
    re.MULTILINE,
)


def first_error(output: str) -> str:
    """The compiler's first error, with its line; else the last line that it wrote."""
    match = _ERROR_LINE.search(output)
    if match:
        return match[0].strip()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it says nothing")


def cause_of_build(output: str, torch_version: str) -> Cause | None:
    """From what the compiler or the linker wrote; its first error decides. None: unknown."""
    for text in (first_error(output), output):
        for pattern, what, remedy in _CAUSES:
            if match := re.search(pattern, text):
                groups = match.groupdict()
                name = (groups.get("name") or groups.get("other") or "").strip()
                return Cause(what=what.format(name=name, torch=torch_version), remedy=remedy)
    return None


def cause_of_import(said: str, torch_version: str) -> Cause:
    """From what the loader said of a library that was built."""
    if match := re.search(r"undefined symbol: (?P<name>\S+)", said):
        name = demangled(match["name"])
        if re.search(r"\b(?:at|c10|torch|caffe2)::|^_ZNK?(?:2at|3c10|5torch)", name):
            what = f"torch {torch_version} has no {name}"
            return Cause(what=what, remedy="it was built for another torch, or with another C++ ABI: build it here")
        return Cause(what=f"no source defines {name}", remedy="pass that source too, or link its library")
    if re.search(r"(?:GLIBCXX|CXXABI|GLIBC)_[\d.]+' not found", said):
        what = "the C++ library that Python has loaded is older than the compiler"
        return Cause(what=what, remedy="use the compiler of the same environment (conda install gxx), or an older one")
    if "PyInit_" in said:
        what = "the source defines neither functions for Python nor operators"
        remedy = "pass functions=[...], or use PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) or TORCH_LIBRARY"
        return Cause(what=what, remedy=remedy)
    if "Only a single TORCH_LIBRARY" in said:
        what = "this process has loaded a library of the same namespace already"
        return Cause(what=what, remedy="restart Python, or use TORCH_LIBRARY_FRAGMENT")
    if match := re.search(r"(?P<name>lib\S+\.so\S*): cannot open shared object file", said):
        return Cause(what=f"{match['name']} is not installed, or not found", remedy="set LD_LIBRARY_PATH to its folder")
    return Cause(what="the system cannot load what was built", remedy="see the message")


def demangled(symbol: str) -> str:
    """The name in C++; the symbol itself where c++filt is not installed."""
    try:
        done = subprocess.run(["c++filt", symbol], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return symbol
    return done.stdout.strip() or symbol


# torch.utils.cpp_extension's own lock


@dataclass(frozen=True, kw_only=True)
class StaleLock:
    """A lock file that torch.utils.cpp_extension.load waits for without end, and that no build holds any more."""

    path: str
    age_seconds: float

    def text(self) -> str:
        hours, minutes = divmod(round(self.age_seconds / 60), 60)
        age = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        return f"torch.utils.cpp_extension waits for {self.path}, left {age} ago by a build that was killed"


def stale_locks(least_seconds: float = 0.0) -> list[StaleLock]:
    """Of extensions that torch itself builds. `flatout.kernels.load` needs no such file: the system frees its locks."""
    found = []
    root = environment.torch_extensions_dir()
    for path in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            continue
        if age >= least_seconds and not _is_built_in(path.parent):
            found.append(StaleLock(path=str(path), age_seconds=age))
    return found


def _is_built_in(folder: Path) -> bool:
    """Does a compiler run there? torch's ninja does, in the folder of the build."""
    for process in psutil.process_iter(["name", "cwd"]):
        name, cwd = process.info["name"] or "", process.info["cwd"]
        if cwd == str(folder) and re.search(r"ninja|cc1plus|c\+\+|g\+\+|clang|nvcc|cicc|ld", name):
            return True
    return False
