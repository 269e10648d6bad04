"""Processes that train together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import pytest

from tests.processes import Python

BEGIN = """
import os, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
if ranks > 1:
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
def leave(code=0):
    sys.stdout.flush()
    if ranks > 1 and code == 0:
        distributed.barrier()
    os._exit(code)  # gloo's threads at times abort the interpreter's own end
"""

RunRanks = Callable[..., list[tuple[int, str, str]]]


@pytest.fixture
def run_ranks(python: Python) -> RunRanks:
    """(script, ranks, *arguments) -> of each rank its exit status, stdout and stderr.

    The script finds `rank`, `ranks` and, from sys.argv[4] on, the arguments; it ends with leave().
    """

    def run(script: str, ranks: int, *arguments: object) -> list[tuple[int, str, str]]:
        with tempfile.TemporaryDirectory() as folder:  # where they meet: a free port might not stay free
            rest = (str(ranks), f"{folder}/store", *map(str, arguments))
            commands = [("-c", BEGIN + script, str(rank), *rest) for rank in range(ranks)]
            return [(ended.returncode, ended.stdout, ended.stderr) for ended in python.together(*commands)]

    return run
