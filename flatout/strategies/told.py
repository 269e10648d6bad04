"""What a process that trains with the user's step is told, through a file in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from flatout.decoding import decode
from flatout.plan import Plan

FILE, FACTS, LOSSES, WEIGHTS = "told.json", "facts.json", "losses.json", "weights.pt"
"""In the folder: the request, and the answers to it."""
TRAINER = "flatout.strategies.trainer"

Role = Literal["train", "record", "facts"]


@dataclass(frozen=True, kw_only=True)
class Told:
    spec: str
    """'train.py:make'."""
    plan: str
    """As TOML."""
    role: Role
    """Train until it is ended; train some steps, and leave losses and weights; or find out what is known before."""
    ranks: int
    """How many train, or are to train."""
    steps: int = 0
    """That are recorded."""
    nudge: float = 0.0
    """Relative size of the random change of every weight before the first step, at least its dtype's; 0: none."""
    nudge_seed: int = 0
    samples: int | None = None
    """In a batch of one process, of which a rank of ddp, zero1 or fsdp takes a share; None: unknown."""
    memory_limit_bytes: int | None = None
    """What one process may take; None: unknown. Where a forecast is above it, no step is run to find out its time."""

    @classmethod
    def of(cls, folder: Path) -> Told:
        return decode(cls, json.loads((folder / FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def answer(self) -> str | None:
        """What it leaves; None: it trains until it is ended."""
        return {"facts": FACTS, "record": WEIGHTS}.get(self.role)

    def planned(self) -> Plan:
        return Plan.from_toml(self.plan)
