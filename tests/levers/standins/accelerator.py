"""The stand-in accelerator, built once with the C++ compiler that torch.compile needs too: `load()`, then device 'hpu'.

Run as a program it makes a script train under Flatout's runner with its model moved there:

    python accelerator.py train.py [its arguments]

with the loss of a wide last layer in chunks, if the environment says CHUNKED=1.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

NAME = "hpu"


def load() -> None:
    """Make torch know the device. Takes a quarter of a minute the first time."""
    import torch

    module: Any = types.ModuleType(f"torch.{NAME}")
    module._lazy_init = module._is_in_bad_fork = lambda: None
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    sys.modules[module.__name__] = module
    torch._register_device_module(NAME, module)
    torch.ops.load_library(build())


def build() -> str:
    """The library's path; compiled where it is not there yet or older than its source."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    source = Path(__file__).with_suffix(".cpp")
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"flatout_stand_in_{os.getuid()}_{digest}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(part)]
        command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch"], check=True, capture_output=True)
        part.rename(library)
    return str(library)


def main(arguments: list[str]) -> None:
    load()
    from flatout.levers.chunked_loss import ChunkedLoss
    from flatout.levers.lever import Choice
    from flatout.levers.moved_to_device import MovedToDevice
    from flatout.script.entry import Target, execute
    from flatout.script.runner import Runner

    choices = [Choice(MovedToDevice(), NAME)]
    if os.environ.get("CHUNKED"):
        choices.append(Choice(ChunkedLoss(), "chunked"))
    runner = Runner(choices)
    runner.install()
    status = execute(Target(path=arguments[0], arguments=tuple(arguments[1:])))
    runner.ended()
    told = [f"rolled back: {entry.reason}" for entry in runner.applied.rolled_back]
    told += [f"{name}: {why}" for name, why in runner.watch.subject.incidents]
    sys.stderr.write("\n".join(told))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # autograd's thread for a device outlives Python, and may end in an abort


if __name__ == "__main__":
    main(sys.argv[1:])
