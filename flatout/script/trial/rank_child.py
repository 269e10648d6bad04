"""The process of one rank of a script that trains in ranks by itself: `flatout.tuning.ranks.script`.

What started it has isolated it. A launcher's variables say which of the ranks it is; in a process that the script
starts itself (`rank_starter`), torch.distributed says so after its first step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from flatout.environment import launched
from flatout.machine.ranks import joined_rank
from flatout.plan_choices import ChoiceValue
from flatout.script.entry import Target
from flatout.script.process_end import call_at_end
from flatout.script.trial.commanded_rank import CommandedRank
from flatout.script.trial.session import Session

SETTINGS = "ranks.json"


class RankSettings(TypedDict):
    """What all ranks are told: levers and choices as in a TrialConfig, and the script's command."""

    levers: str
    choices: list[list[ChoiceValue]]
    target: list[str]


def follow(folder: Path) -> None:
    """Take commands in this process, which the script has started, or which is its own; torch has been imported."""
    settings, target = rank_settings(folder)
    child = CommandedRank(folder, joined_rank, target)
    session = Session(child, settings["levers"], settings["choices"], child.read)
    session.install_late(sys.modules["torch"])
    call_at_end(lambda: child.end(session))


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder of the trial."""
    folder = Path(arguments[0])
    settings, target = rank_settings(folder)
    place = launched()
    assert place is not None
    child = CommandedRank(folder, lambda: place[0], target)
    session = Session(child, settings["levers"], settings["choices"], child.read)
    session.install()
    return child.run(session)


def rank_settings(folder: Path) -> tuple[RankSettings, Target]:
    settings: RankSettings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    return settings, Target.from_command(settings["target"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
