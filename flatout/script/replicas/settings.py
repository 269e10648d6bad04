"""What the ranks of a run are told, as a file in a folder of that run, and what they leave there for their parent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from flatout.decoding import decode
from flatout.errors import MachineError, UsageError

SETTINGS, FACTS = "settings.json", "facts.json"
REFUSED = "refused-"
"""Followed by the rank."""
STATUS = 2
"""Of a rank that refuses: as of any input that cannot be used."""
UNTOUCHED = "flatout launch"
SCRATCH = "scratch-"
RUN_FOLDER, SUMMARY = "run-folder", "summary.txt"
"""Of the first rank: where it keeps its state, and what it has to say at its end."""
LATE, ERRORS = "late", "errors-"
"""Of a profiled run: a rank took too few steps; what each wrote to stderr."""
RECORD, LOSSES = "record.json", "losses-"
"""Of a recorded run: what the first rank computed, and each rank's part of the losses."""

NOT_IN_RANKS = ("allocator", "device", "optimizer_in_backward", "zero_grad")
"""Choices of a plan that a rank does without: they start the process over, move the model, or take gradients before
they are averaged."""

Batch = Literal["global", "per-device"]
Loss = Literal["mean", "sum", "terms"]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Of a run that is only a trial for the proof: what to record before it ends."""

    steps: int
    role: Literal["reference", "checked", "free"]
    """Its own steps ('free'), or each compared step from the reference's state ('checked'), which a run of the first
    kind writes ('reference')."""
    seeds_moved: int = 0
    """Is added to every seed."""
    nudge_ulps: int = 0
    """Move the weights by so many rounding errors at each step that is compared."""
    without_dropout: bool = False
    """Leave out dropout: the masks of several ranks cannot be those of one device."""
    reference: str
    """The folder of the reference."""
    checks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a run on several devices; the same for all ranks."""

    batch: Batch = "global"
    """What a batch size in the script counts: the samples of all ranks together, or of each."""
    loss: Loss | None = None
    """What the script's loss is over its batch; None: a mean over samples, unless its graph shows something else."""
    allow_local_batchnorm: bool = False
    isolated: bool = True
    """Do ranks other than the first see a private copy of the files that they write?"""
    visible: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each rank; empty: they train on the CPU."""
    shared: tuple[str, ...] = ()
    """Folders that all ranks may write to: caches."""
    recording: Recording | None = None
    """Of a trial for the proof."""
    is_trial: bool = False
    """Does no rank write the user's files, and nobody read what it prints?"""
    levers: str = "flatout.levers.catalogue:LEVERS"
    """Of a trial: where they are declared."""
    choices: tuple[tuple[bool | int | str, ...], ...] = ()
    """Of a trial: those that are on; where it takes commands, from its start."""

    def write(self, folder: Path) -> None:
        (folder / SETTINGS).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Settings:
        return decode(cls, json.loads((folder / SETTINGS).read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the first rank saw of the sharing."""

    ranks: int
    updates: int = 0
    """How often gradients were averaged."""
    batches: int = 0
    """Training batches that were shared out."""
    samples: int | None = None
    """Of the largest of them, on all ranks together; None: there was none."""
    own_samples: int | None = None
    """Of its share of that."""
    uneven: int = 0
    """Batches of which ranks had different numbers of samples."""
    batch_norms: int = 0
    draws_in_model: bool = False
    """Did a model draw random numbers on the CPU, as dropout does?"""
    realigned: int = 0
    """How often the random numbers of the ranks had come apart, and were set to the first rank's."""
    unseeded: tuple[str, ...] = ()
    """Places in the script that took a seed from the system or the clock, and got one that is the same for all."""
    multiplied: bool = False
    """Were batch sizes multiplied by the number of ranks?"""

    def write(self, folder: Path) -> None:
        (folder / FACTS).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Facts | None:
        """None: no rank got as far."""
        try:
            return decode(cls, json.loads((folder / FACTS).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None


class Refused(SystemExit):
    """Ends this rank; the other ranks learn of it before the next exchange, and the parent says why, once.

    SystemExit, so that a script that catches its own errors (`except Exception`) does not go on half shared, while its
    `finally` blocks and exit handlers run.
    """

    def __init__(self) -> None:
        super().__init__(STATUS)


class Refusals:
    """Of one rank, for its parent."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"{REFUSED}{rank}.json"
        self.refused = False

    def refuse(self, what: str, *, limit: str = "", remedy: str = "", machine: bool = False) -> Refused:
        """What to raise. machine: it is the machine that lacks something, not the script."""
        self.refused = True
        if not self._path.exists():  # the first one is the cause
            told = {"what": what, "limit": limit, "remedy": remedy, "machine": machine}
            self._path.write_text(json.dumps(told), encoding="utf-8")
        return Refused()


def refusal_of(folder: Path) -> UsageError | MachineError | None:
    """Of the rank with the lowest number that refused; None: none did."""
    for path in sorted(folder.glob(f"{REFUSED}*.json"), key=lambda one: int(one.stem.removeprefix(REFUSED))):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # the rank was killed while it wrote
        kind = MachineError if told["machine"] else UsageError
        return kind(told["what"], limit=told["limit"], remedy=told["remedy"])
    return None
