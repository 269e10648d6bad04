"""`python -m benchmarks.search.short_and_long`: what a tune of a minute finds, beside what a long one finds.

Each script is tuned twice, with --short and with --long seconds, each time as if nothing had been tuned before: with a
cache folder of its own, so that there are neither compiled kernels nor earlier tunes. Then a process with the one plan
takes turns with a process with the other. How much of the long tune's gain the short one found is the step's time
under the long one's plan over that under the short one's. Where both kept the same, that is 1 and is not measured.
A long tune may end early, when all that applies was tried.

    python -m benchmarks.search.short_and_long --out short_and_long.json --checkouts checkouts

Public scripts need checkouts (see benchmarks/scripts/README.md); without them only this project's own are tuned. A
script that --out holds already is not tuned again; with --again, for --short seconds, and compared with the long tune
that is there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.search import two_plans
from benchmarks.search.places import OWN, PUBLIC, in_its_place

MOST_OF_THE_GAIN = 0.5
"""Of the whole gain, as a logarithm: then most of it is there."""
MODULE = "benchmarks.search.short_and_long"


def tune_one(out: Path, budget_seconds: float, command: Sequence[str]) -> None:
    """In a process of its own, started where the script is: leaves what the tune found in `out`. One that refuses has
    found nothing, and why is there."""
    from flatout.errors import ScriptError
    from flatout.machine.with_ceilings import machine_with_ceilings
    from flatout.script.entry import Target
    from flatout.tuning.script_tuning import TuneRequest, tune_script

    machine = machine_with_ceilings(lambda text: None)
    request = TuneRequest(target=Target.from_command(command), budget_seconds=budget_seconds)
    about = {"processor": machine.cpu.name, "torch": machine.versions.torch}
    began = time.perf_counter()
    try:
        result = tune_script(request, machine)
    except ScriptError as refusal:
        nothing = {"step_seconds": None, "kept": [], "speedup": None, "most_of_the_gain_after_seconds": None}
        seconds = time.perf_counter() - began
        out.write_text(json.dumps({"machine": about, "seconds": seconds, "refused": str(refusal), **nothing}))
        return
    state = result.state
    found = {
        "machine": about,
        "seconds": result.seconds,
        "step_seconds": state.first_observed.step_seconds,
        "kept": [choice.to_json() for choice in state.kept],
        "speedup": result.final.comparison.to_json() if result.final is not None else None,
        "most_of_the_gain_after_seconds": seconds_to_most_of_the_gain(state.trials),
        "trials": [trial.to_json() for trial in state.trials],
        "not_tried": [entry.to_json() for entry in state.not_tried],
    }
    out.write_text(json.dumps(found))


def seconds_to_most_of_the_gain(trials: Sequence[Any]) -> float | None:
    """When the levers kept until then made up half of the logarithm of the gain of all that were kept."""
    kept = [trial for trial in trials if trial.outcome == "kept" and trial.comparison is not None]
    gains = [math.log(trial.comparison.ratio) for trial in kept]
    whole, so_far = sum(gains), 0.0
    for trial, gain in zip(kept, gains, strict=True):
        so_far += gain
        if so_far >= MOST_OF_THE_GAIN * whole:
            return float(trial.decided_after_seconds)
    return None


def cell(
    name: str, short_seconds: float, long_seconds: float, checkouts: Path | None, long: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Both tunes of a script and the comparison of their plans. long: such a tune of before; None: it is made now."""
    tunes: dict[str, Any] = {}
    for kind, seconds in (("short", short_seconds), ("long", long_seconds)):
        if kind == "long" and long is not None:
            tunes[kind] = long
            continue
        found = in_its_place(name, checkouts, MODULE, [str(seconds)])
        if found is None:
            return None
        tunes[kind] = {"budget_seconds": seconds, **found}
    if "refused" in tunes["long"]:
        print(f"{name} is left out: {tunes['long']['refused']}", file=sys.stderr)
        return None
    plans = [tunes[kind]["kept"] for kind in ("long", "short")]
    if plans[0] == plans[1]:
        return {**tunes, "same_plan": True, "share": 1.0, "comparison": None}
    compared = in_its_place(name, checkouts, two_plans.MODULE, two_plans.words_for(*plans))
    if compared is None:
        return None
    return {**tunes, "same_plan": False, "share": compared["ratio"], "comparison": compared}


def line(name: str, found: dict[str, Any]) -> str:
    short, long, compared = found["short"], found["long"], found["comparison"]
    interval = "same plan" if compared is None else f"{compared['low']:.3f}-{compared['high']:.3f}"
    after = short["most_of_the_gain_after_seconds"]
    return (
        f"{name:22} {_milliseconds(short['step_seconds'] or long['step_seconds'])}  {_told(short)}  {_told(long)}  "
        f"share {found['share']:.3f} ({interval})  most of the gain after "
        f"{'-' if after is None else f'{after:.0f} s'}"
    )


def _milliseconds(seconds: float | None) -> str:
    return "     unknown" if seconds is None else f"{seconds * 1e3:8.2f} ms"


def _told(tune: dict[str, Any]) -> str:
    if "refused" in tune:
        return f"{tune['budget_seconds']:.0f} s (took {tune['seconds']:.0f}): refused as too short"
    speedup = "nothing kept" if tune["speedup"] is None else f"x{tune['speedup']['ratio']:.2f}"
    kept = ", ".join(f"{lever} {value}" for lever, value in tune["kept"])
    return f"{tune['budget_seconds']:.0f} s (took {tune['seconds']:.0f}): {speedup} [{kept}]"


def summary(cells: Sequence[dict[str, Any]]) -> str:
    if not cells:
        return "nothing measured"
    shares = [found["share"] for found in cells]
    after = [found["short"]["most_of_the_gain_after_seconds"] for found in cells]
    times = [seconds for seconds in after if seconds is not None]
    waited = f"median {median(times):.0f} s" if times else "unknown, because nothing was kept"
    return (
        f"{len(cells)} scripts: found in the short time, of the long one's gain: median {median(shares):.1%}, worst "
        f"{min(shares):.1%}; most of the gain after: {waited}"
    )


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        tune_one(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
        return 0
    names = [*OWN, *(script.name for script in PUBLIC)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=float, default=60.0, help="seconds of the short tunes")
    parser.add_argument("--long", type=float, default=1800.0, help="seconds of the long tunes")
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--again", action="store_true", help="make the short tunes again")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"scripts": {}}
    for name in arguments.only:
        before = document["scripts"].get(name)
        if before is None or arguments.again:
            checkouts = arguments.checkouts and arguments.checkouts.resolve()
            long = None if before is None else before["long"]
            found = cell(name, arguments.short, arguments.long, checkouts, long)
            if found is None:
                continue
            document["machine"] = found["short"]["machine"]
            document["scripts"][name] = found
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        print(line(name, document["scripts"][name]), flush=True)
    print(summary(list(document["scripts"].values())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
