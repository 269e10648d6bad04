"""A script that starts two ranks to train in, which talk by gloo."""

from __future__ import annotations

import textwrap

_SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, kind, steps):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
{body}
if __name__ == "__main__":
    kind, steps, *method = sys.argv[1:]
    context = mp.get_context(*method or ["spawn"])
    processes = [context.Process(target=train, args=(rank, kind, int(steps))) for rank in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
"""


def rank_script(body: str) -> str:
    """body: of `train(rank, kind, steps)`, once the group is there. The script's arguments are kind, steps and how
    processes are started ('spawn' by default)."""
    return _SCRIPT.format(body=textwrap.indent(textwrap.dedent(body), "    "))
