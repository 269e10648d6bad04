"""The process of a script that starts the ranks itself: `flatout.tuning.ranks.script`. They, and this process where it
trains too, take commands (`commanded_rank.follow`); it says how it ended.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from flatout.script.entry import execute
from flatout.script.following import follow_children, follow_here
from flatout.script.trial.commanded_rank import rank_settings
from flatout.script.trial.isolated_child import ended_answer
from flatout.whole_files import written_whole

END = "script-end.json"
"""How it ended: an answer, in the folder of the trial."""


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder of the trial."""
    folder = Path(arguments[0])
    _, target = rank_settings(folder)
    follow_children(folder)
    follow_here(folder)
    errors: list[str] = []
    own = os.getpid()
    status = execute(target, lambda error: errors.append("".join(traceback.format_exception(error))))
    if os.getpid() != own:  # a process that the script has forked
        return status
    with written_whole(folder / END, durable=False) as temporary:
        temporary.write_text(json.dumps(ended_answer(status, "".join(errors))), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
