"""The stand-in accelerator, built once with the C++ compiler that torch.compile needs too: `load()`, then device 'hpu'.

Run as a program it makes a script train under Flatout's runner with its model moved there:

    python accelerator.py train.py [its arguments]
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

NAME = "hpu"


def load() -> None:
    """Make torch know the device. Takes a quarter of a minute the first time."""
    import torch
    from torch.utils.cpp_extension import load as build

    module: Any = types.ModuleType(f"torch.{NAME}")
    module._lazy_init = module._is_in_bad_fork = lambda: None
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    sys.modules[module.__name__] = module
    torch._register_device_module(NAME, module)
    source = str(Path(__file__).with_suffix(".cpp"))
    build("flatout_stand_in_accelerator", [source], extra_cflags=["-O0"], with_cuda=False)


def main(arguments: list[str]) -> None:
    load()
    from flatout.levers.lever import Choice
    from flatout.levers.moved_to_device import MovedToDevice
    from flatout.script.entry import Target, execute
    from flatout.script.runner import Runner

    runner = Runner([Choice(MovedToDevice(), NAME)])
    runner.install()
    status = execute(Target(path=arguments[0], arguments=tuple(arguments[1:])))
    runner.ended()
    told = [f"rolled back: {entry.reason}" for entry in runner.applied.rolled_back]
    told += [f"{name}: {why}" for name, why in runner.watch.subject.incidents]
    sys.stderr.write("\n".join(told))
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
