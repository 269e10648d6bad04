"""`python -m benchmarks.search.predictions`: what levers are predicted to save, beside what was measured.

Each script is searched as `flatout tune` does, without the proof, and with the levers that it would leave out because
they are predicted not to pay. Of each trial: does the measured ratio lie in the predicted interval, how far off is the
predicted one, and was anything left out that would have been kept?

    python -m benchmarks.search.predictions --out predictions.json --checkouts checkouts

Public scripts need checkouts (see benchmarks/scripts/README.md); without them only this project's own are searched. A
script that --out holds already is not searched again. `--fitted NAME ...` marks those whose trials were looked at when
the predictions were written: the others are summed up apart.

Nothing that earlier tunes measured is used (see `benchmarks`). How much it helps is computed from --out: each script's
trials, predicted once more with those of all other scripts as the history (`flatout.tuning.history`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scripts.catalogue import PUBLIC_SCRIPTS
from benchmarks.search.places import OWN, PUBLIC, place_of
from flatout.levers.lever import Saving
from flatout.tuning.history import Earlier, Training, corrected

FITTED = (
    *("digits_mlp", "digits_cnn", "mlp 16 16", "mlp 128 64", "mlp 512 128", "cnn 16 32", "cnn 32 128", "gpt 32 8"),
    *("gpt 128 16", *(script.name for script in PUBLIC_SCRIPTS if script.name != "vae")),
)
"""Their trials were looked at when the predictions were written."""


def search_one(out: Path, budget_seconds: float, command: Sequence[str]) -> None:
    """In a process of its own, started where the script is: leaves the trials in `out`."""
    from flatout.levers.catalogue import LEVERS
    from flatout.machine.with_ceilings import machine_with_ceilings
    from flatout.script.entry import Target
    from flatout.script.trial.fork_server import ForkServer
    from flatout.script.trial.setup import TrialSetup
    from flatout.search.deadline import Deadline
    from flatout.tuning import proposals
    from flatout.tuning.proposals import SearchLimits
    from flatout.tuning.training_search import TrainingSearch

    vars(proposals)["LEAST_GAIN"] = -math.inf  # nothing is predicted to save too little to try
    machine = machine_with_ceilings(lambda text: None)
    with tempfile.TemporaryDirectory(prefix="flatout-bench-", dir="/var/tmp") as folder, ForkServer() as server:
        setup = TrialSetup(target=Target.from_command(command), work_folder=Path(folder), fork_server=server)
        search = TrainingSearch(setup, machine, LEVERS, SearchLimits(deadline=Deadline(budget_seconds)))
        search.run()
    found = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "observed": search.state.first_observed.to_json(),
        "trials": [trial.to_json() for trial in search.state.trials],
        "not_tried": [entry.to_json() for entry in search.state.not_tried],
    }
    out.write_text(json.dumps(found))


def measured(name: str, budget_seconds: float, checkouts: Path | None) -> dict[str, Any] | None:
    with place_of(name, checkouts) as place, tempfile.TemporaryDirectory() as folder:
        if place is None:
            return None
        out = Path(folder) / "found.json"
        words = [sys.executable, "-m", "benchmarks.search.predictions", "--one", str(out), str(budget_seconds)]
        done = subprocess.run(
            [*words, *place.command], cwd=place.folder, env=place.environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            print(f"{name}: {done.stderr.strip()[-300:]}", flush=True)
            return None
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each trial that has a prediction and a comparison."""
    rows = []
    for trial in found["trials"]:
        predicted, comparison = trial["predicted"], trial["comparison"]
        if predicted is None or comparison is None:
            continue
        least, expected, most = (1 / max(1e-3, 1 - predicted[name]) for name in ("least", "expected", "most"))
        # Windows of one process that alternate: a few per cent more or less are the machine's.
        low, high = comparison["low"], comparison["high"]
        if not math.isfinite(high):  # far slower in two pairs: no interval
            low = high = comparison["ratio"]
        rows.append(
            {
                "lever": trial["label"],
                "predicted": [least, expected, most],
                "measured": [low, comparison["ratio"], high],
                "inside": least <= high and low <= most,
                "point_inside": least <= comparison["ratio"] <= most,
                "error": abs(math.log(comparison["ratio"] / expected)),
                "left_out": most < 1.01,
                "kept": trial["outcome"] == "kept",
            }
        )
    return rows


def with_history(scripts: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the same trials, each script's predicted with those of the others as what earlier tunes measured."""
    earlier = [
        Earlier(
            machine="",
            versions="",
            training=name,
            device=found["observed"]["device"].partition(":")[0],
            choice=row["lever"],
            predicted=row["predicted"][1],
            measured=row["measured"][1],
            low=None,
            high=None,
            at="2026-01-01",
        )
        for name, found in scripts.items()
        for row in judged(found)
    ]
    rows: list[dict[str, Any]] = []
    for name, found in scripts.items():
        others = [one for one in earlier if one.training != name]
        here = Training(digest=name, device=found["observed"]["device"].partition(":")[0])
        trials = []
        for trial in found["trials"]:
            if trial["predicted"] is not None:
                own = Saving(**{bound: trial["predicted"][bound] for bound in ("least", "expected", "most")})
                trial = {**trial, "predicted": asdict(corrected(own, trial["label"], here, others))}
            trials.append(trial)
        # The levers' own predictions alone decide what is left out.
        pairs = zip(judged(found), judged({"trials": trials}), strict=True)
        rows += [{**row, "left_out": own["left_out"]} for own, row in pairs]
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "no trials"
    inside, points = (sum(row[name] for row in rows) / len(rows) for name in ("inside", "point_inside"))
    left_out = [row for row in rows if row["left_out"]]
    return (
        f"{len(rows)} trials: median error {math.expm1(median(row['error'] for row in rows)):.1%}; "
        f"{points:.0%} of the measured ratios inside the predicted interval, {inside:.0%} with their own; "
        f"{len(left_out)} would have been left out, {sum(row['kept'] for row in left_out)} of them were kept"
    )


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        search_one(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
        return 0
    names = [*OWN, *(script.name for script in PUBLIC)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of each search")
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--fitted", nargs="*", default=FITTED)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"scripts": {}}
    for name in arguments.only:
        if name not in document["scripts"]:
            found = measured(name, arguments.budget, arguments.checkouts and arguments.checkouts.resolve())
            if found is None:
                continue
            document["machine"] = found.pop("machine")
            document["scripts"][name] = found
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        print(name, flush=True)
        for row in judged(document["scripts"][name]):
            least, expected, most = row["predicted"]
            mark = "" if row["inside"] else "  OUTSIDE"
            print(
                f"  {row['lever']:32} predicted x{expected:.2f} ({least:.2f}-{most:.2f})  measured "
                f"x{row['measured'][1]:.2f} ({row['measured'][0]:.2f}-{row['measured'][2]:.2f})"
                f"{'  kept' if row['kept'] else ''}{mark}",
                flush=True,
            )
    fitted = [row for name in arguments.fitted for row in judged(document["scripts"].get(name, {"trials": []}))]
    others = [
        row for name, found in document["scripts"].items() if name not in arguments.fitted for row in judged(found)
    ]
    print(f"looked at before: {summary(fitted)}\nnot looked at:    {summary(others)}")
    print(f"all: {summary([row for found in document['scripts'].values() for row in judged(found)])}")
    print(f"all, corrected by the trials of the other scripts: {summary(with_history(document['scripts']))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
