"""`python -m benchmarks.train.corruption`: random damage to checkpoint files is detected, and nothing is executed.

Bits flipped, files cut short, lengthened, swapped, removed or replaced by a malicious pickle under the file's own name.
Each time the damaged checkpoint must be passed over for the one before, which must load unchanged.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout import Checkpoints, capture
from flatout.machine.detect import detect


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


def flip(files: list[Path], chance: random.Random, trap: Path) -> None:
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(files: list[Path], chance: random.Random, trap: Path) -> None:
    path = chance.choice(files)
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def lengthen(files: list[Path], chance: random.Random, trap: Path) -> None:
    path = chance.choice(files)
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 64)))


def swap(files: list[Path], chance: random.Random, trap: Path) -> None:
    one, other = chance.sample(files, 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def remove(files: list[Path], chance: random.Random, trap: Path) -> None:
    chance.choice(files).unlink()


def poison(files: list[Path], chance: random.Random, trap: Path) -> None:
    chance.choice(files).write_bytes(pickle.dumps(Malicious(trap)))


DAMAGES: tuple[Callable[[list[Path], random.Random, Path], None], ...] = (flip, cut, lengthen, swap, remove, poison)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.corruption", description=__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args(words)
    chance = random.Random(arguments.seed)
    found: collections.Counter[str] = collections.Counter()
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        whole, broken, trap = (Path(temporary) / name for name in ("whole", "broken", "trap"))
        model = nn.Linear(32, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in (1, 2):
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            Checkpoints(whole).save(capture(model=model, optimizer=optimizer), step=step)
        for _ in range(arguments.times):
            damage = chance.choice(DAMAGES)
            shutil.copytree(whole, broken)
            newest = max(path for path in broken.iterdir() if path.is_dir())
            files = sorted(path for path in newest.rglob("*") if path.is_file())
            damage(files, chance, trap)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = Checkpoints(broken).load()
            if loaded is None or loaded.step != 1 or trap.exists():
                missed.append(damage.__name__)
            found[damage.__name__] += 1
            shutil.rmtree(broken)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
    outcome = f"NOT DETECTED: {missed}" if missed else "each detected, none executed"
    print(f"{arguments.times} corruptions ({counts}): {outcome}")
    if arguments.out:
        result = {"corruptions": dict(found), "not_detected": missed}
        document = {"benchmark": "train.corruption", "machine": detect().to_json(), **result}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if not missed else 1


if __name__ == "__main__":
    sys.exit(main())
