"""A process that forks, one after the other, children that save in a loop until they are killed.

python -m tests.checkpoint.saving_child FOLDER synchronous|asynchronous CHILDREN

Each child writes its process id and the step from which it goes on; when it is gone, its parent says so. Forked, as
the start of torch takes long.
"""

from __future__ import annotations

import os
import random
import sys

import numpy.random  # noqa: F401  (whose state a first capture asks for: loaded once, not in each child)
import torch

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore


def content(step: int) -> torch.Tensor:
    """What the weights are at a step: a checkpoint with parts of two steps shows."""
    return torch.arange(20_000, dtype=torch.float32) + step


def save_until_killed(folder: str, mode: str) -> None:
    model = torch.nn.Linear(200, 100, bias=False)
    checkpoints = Checkpoints(folder, keep_last=2, keep_best=1, asynchronous=mode == "asynchronous")
    loaded = checkpoints.load()
    step = 0
    if loaded is not None:
        restore(loaded, model=model)
        step = loaded.step
        assert torch.equal(model.weight.flatten(), content(step))
    os.write(1, f"{os.getpid()} {step}\n".encode())
    while True:
        step += 1
        with torch.no_grad():
            model.weight.copy_(content(step).view(100, 200))
        checkpoints.save(capture(model=model, extra={"step": step}), step=step, metric=random.random())


def main(folder: str, mode: str, children: str) -> None:
    torch.set_num_threads(1)  # a fork has no pool of threads
    for _ in range(int(children)):
        child = os.fork()
        if child == 0:
            save_until_killed(folder, mode)
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
