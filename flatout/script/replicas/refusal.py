"""The end of a script that cannot be shared: every rank leaves by SystemExit, and the parent says why, once.

SystemExit, so that a script that catches its own errors (`except Exception`) does not go on half shared, while its
`finally` blocks and exit handlers run.
"""

from __future__ import annotations

import json
from pathlib import Path

from flatout.errors import MachineError, UsageError
from flatout.script.replicas.settings import REFUSED

STATUS = 2
"""Of a rank that refuses: as of any input that cannot be used."""
UNTOUCHED = "flatout launch"


class Refused(SystemExit):
    """Ends this rank; the other ranks learn of it before the next exchange."""

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
