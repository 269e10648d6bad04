"""Two plans of one script beside each other: pairs of fresh processes, one with each, in alternating windows.

    python -m benchmarks.search.two_plans --one OUT FIRST SECOND script.py ...

FIRST and SECOND are lists of [lever, value] as JSON; OUT gets the comparison as JSON: how many times as fast the steps
are under the second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import choices_from_json, split_by_switch
from flatout.script.entry import Target
from flatout.script.trial.fork_server import ForkServer
from flatout.script.trial.setup import TrialSetup
from flatout.statistics import Comparison
from flatout.tuning.last_comparison import LEAST_WINDOWS, MOST_WINDOWS, comparison_of_groups
from flatout.tuning.windows import LEAST_GAIN, Arm, Pace, compare_arms

MODULE = "benchmarks.search.two_plans"
PROCESS_PAIRS, PAIR_SECONDS = 5, 5.0


def words_for(first: Any, second: Any) -> list[str]:
    """After OUT, for two plans as lists of [lever, value]."""
    return [json.dumps(first), json.dumps(second)]


def compare_two(first: str, second: str, command: Sequence[str]) -> Comparison:
    plans = [choices_from_json(json.loads(words), LEVERS) for words in (first, second)]
    groups: list[list[tuple[float, float]]] = []
    with tempfile.TemporaryDirectory(prefix="flatout-bench-", dir="/var/tmp") as folder, ForkServer() as server:
        setup = TrialSetup(target=Target.from_command(command), work_folder=Path(folder), fork_server=server)
        for _ in range(PROCESS_PAIRS):
            (first_start, first_live), (second_start, second_live) = (split_by_switch(plan) for plan in plans)
            with setup.trial(first_start) as one, setup.trial(second_start) as other:
                one.start()
                other.start()
                arms = Arm(one, first_live, suspended=True), Arm(other, second_live, suspended=True)
                step_seconds = median(arms[0].window(settle=2, steps=3).seconds)
                pace = replace(
                    Pace.for_step(step_seconds, seconds=PAIR_SECONDS),
                    least_pairs=LEAST_WINDOWS,
                    most_pairs=MOST_WINDOWS,
                    stops_when_decided=False,
                )
                groups.append([])
                compare_arms(*arms, pace, collected=groups[-1])
    return comparison_of_groups(groups, LEAST_GAIN)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compare_two(*sys.argv[3:5], sys.argv[5:]).to_json()))
