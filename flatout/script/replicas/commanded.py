"""A rank of a script on several devices, in a trial that takes commands: `flatout.tuning.devices.ranks_trial`.

What is timed is what a rank of a real run does: its shares, its exchanges, and the levers of a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.script.entry import Target
from flatout.script.replicas.rank import begin
from flatout.script.trial.commanded_rank import CommandedRank
from flatout.script.trial.session import Session


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder of the run, then the script and its own."""
    folder, target = Path(arguments[0]), Target.from_command(arguments[1:])
    rank = begin(folder)
    child = CommandedRank(folder, lambda: rank.number, target)
    session = Session(child, rank.settings.levers, rank.settings.choices, child.read)
    rank.replica.at_torch += session.at_torch
    rank.replica.install()
    return child.run(session, rank.replica.end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
