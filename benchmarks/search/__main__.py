"""`python -m benchmarks.search`: the search's result beside the best of all combinations of its levers.

For each script the search runs as in a tune, with nothing compiled before. Then every subset of the levers that apply
(those predicted to save most, up to MOST_LEVERS, with the first of their values) is timed against the plain script in
interleaved windows, and the best of these against what the search kept, in pairs of fresh processes. A subset that
compiles, or that a process keeps once it is on, has processes of its own. Both costs are wall seconds, the script's
start included.

    python -m benchmarks.search --out search.json --checkouts checkouts

Public scripts need checkouts (see benchmarks/scripts/README.md). A script that --out holds already is left as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.search import two_plans
from benchmarks.search.places import OWN, PUBLIC, in_its_place
from flatout.errors import TrialError
from flatout.levers.catalogue import LEVERS, in_order
from flatout.levers.lever import Choice
from flatout.machine.description import Machine
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.script.entry import Target
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.training_search import TrainingSearch
from flatout.tuning.windows import Arm, Pace, compare_arms

MODULE = "benchmarks.search.__main__"
SCRIPTS = ("digits_mlp", "digits_cnn", "classic_loop", "tiny_diffusion", "makemore", "vae", "mnist", "mlp 512 128")
MOST_LEVERS = 8
"""Whose subsets are tried: 256 combinations."""
SEARCH_SECONDS = 600.0
SUBSET_SECONDS = 5.0


def offered(process: TrialProcess, machine: Machine) -> list[Choice]:
    """The first value of each lever that applies to this loop, is for speed, and can be turned on in a process."""
    process.window([], settle=3, steps=3)
    observed = process.breakdown([], steps=20)
    found: dict[str, tuple[float, Choice]] = {}
    for lever in LEVERS:
        verdict = lever.applies(machine, observed)
        if verdict and lever.aim == "time" and lever.switch in ("live", "once") and lever.plan_field not in found:
            saved = lever.saving(machine, observed).expected
            found[lever.plan_field] = saved, Choice(lever, verdict.values[0])
    best = sorted(found.values(), key=lambda one: -one[0])[:MOST_LEVERS]
    return in_order(choice for _, choice in best)


def measured(out: Path, command: Sequence[str]) -> None:
    """In a process of its own, started where the script is."""
    machine = machine_with_ceilings(lambda text: None)
    with tempfile.TemporaryDirectory(prefix="flatout-bench-", dir="/var/tmp") as folder:
        setup = TrialSetup(target=Target.from_command(command), work_folder=Path(folder))
        with TrialProcess(setup) as process:
            process.start()
            choices = offered(process, machine)
        began = time.perf_counter()
        search = TrainingSearch(setup, machine, LEVERS, SearchLimits(deadline=Deadline(SEARCH_SECONDS)))
        search.run()
        state = search.state
        search_seconds = time.perf_counter() - began
        began = time.perf_counter()
        ratios = _every_subset(setup, choices, state.first_observed.step_seconds or 0.01)
        exhaustive_seconds = time.perf_counter() - began
    best, ratio = max(ratios, key=lambda entry: entry[1])
    found = {
        "levers": [choice.to_json() for choice in choices],
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "step_seconds": state.first_observed.step_seconds,
        "combinations": len(ratios),
        "exhaustive_seconds": exhaustive_seconds,
        "exhaustive_best": [choice.to_json() for choice in best],
        "exhaustive_ratio": ratio,
        "search_seconds": search_seconds,
        "search_kept": [choice.to_json() for choice in state.kept],
    }
    out.write_text(json.dumps(found))


def _every_subset(
    setup: TrialSetup, choices: Sequence[Choice], step_seconds: float
) -> list[tuple[list[Choice], float]]:
    """Of the levers, with how many times as fast the steps are; without any: 1. Those that cannot be on together are
    left out."""
    ratios: list[tuple[list[Choice], float]] = [([], 1.0)]
    pace = Pace.for_step(step_seconds, seconds=SUBSET_SECONDS)
    with contextlib.ExitStack() as stack:
        processes: dict[tuple[bool, bool], TrialProcess] = {}

        def process_for(*, compiles: bool, once: bool) -> TrialProcess:
            if (found := processes.get((compiles, once))) is None:
                found = processes[compiles, once] = stack.enter_context(TrialProcess(setup))
                found.start()
                found.expected_step_seconds = step_seconds
                found.window([], settle=3, steps=3)
            return found

        plain = Arm(process_for(compiles=False, once=False))
        for size in range(1, len(choices) + 1):
            for subset in itertools.combinations(choices, size):
                compiles = any(choice.lever.compiles for choice in subset)
                once = any(choice.lever.switch == "once" for choice in subset)
                try:
                    theirs = Arm(process_for(compiles=compiles, once=once), subset)
                    ratios.append(([*subset], compare_arms(plain, theirs, pace).comparison.ratio))
                except TrialError as error:
                    print(f"{[choice.label for choice in subset]}: {error}", file=sys.stderr)
    return ratios


def cell(name: str, checkouts: Path | None) -> dict[str, Any] | None:
    """Both, and the two plans beside each other."""
    found = in_its_place(name, checkouts, MODULE, [])
    if found is None:
        return None
    best, kept = found["exhaustive_best"], found["search_kept"]
    if sorted(best) == sorted(kept):
        return {**found, "share": 1.0, "comparison": None}
    compared = in_its_place(name, checkouts, two_plans.MODULE, two_plans.words_for(best, kept))
    return None if compared is None else {**found, "share": compared["ratio"], "comparison": compared}


def line(name: str, found: dict[str, Any]) -> str:
    compared = found["comparison"]
    interval = "the same" if compared is None else f"{compared['low']:.3f} to {compared['high']:.3f}"
    return (
        f"{name:16} best of {found['combinations']} x{found['exhaustive_ratio']:.2f} "
        f"[{_told(found['exhaustive_best'])}] in {found['exhaustive_seconds']:.0f} s; search kept "
        f"[{_told(found['search_kept'])}] in {found['search_seconds']:.0f} s ({cost_share(found):.0%} of the cost), at "
        f"{found['share']:.3f} of the best ({interval})"
    )


def _told(choices: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{lever} {value}" for lever, value in choices)


def cost_share(found: dict[str, Any]) -> float:
    return float(found["search_seconds"] / found["exhaustive_seconds"])


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        measured(Path(sys.argv[2]), sys.argv[3:])
        return 0
    names = [*OWN, *(script.name for script in PUBLIC)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=SCRIPTS)
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"scripts": {}}
    for name in arguments.only:
        if name not in document["scripts"]:
            found = cell(name, arguments.checkouts and arguments.checkouts.resolve())
            if found is None:
                continue
            document["machine"] = found["machine"]
            document["scripts"][name] = found
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        print(line(name, document["scripts"][name]), flush=True)
    if cells := list(document["scripts"].values()):
        shares, costs = [one["share"] for one in cells], [cost_share(one) for one in cells]
        print(
            f"{len(cells)} scripts: of the best combination's speed: median {median(shares):.1%}, worst "
            f"{min(shares):.1%}; of its cost: median {median(costs):.0%}, most {max(costs):.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
