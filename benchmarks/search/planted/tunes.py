"""How often does a whole tune keep something where nothing helps?

    python -m benchmarks.search.planted.tunes [--tunes 100] [--budget 20] [--beside N] [--out results.json]

A script is tuned with five levers that do nothing: search, second looks, proof and last comparison, as a user's tune. A
tune that ends with a plan is a false keep. `--beside`: so many processes that keep the machine busy meanwhile. Tunes
that --out holds, of the same budget and as many processes, count among --tunes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.search.planted.__main__ import BUSY, SCRIPT
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.tuning.script_tuning import TuneRequest, tune_script

LEVERS = f"{Path(__file__).with_name('__init__.py')}:NULL_LEVERS"


@dataclass(frozen=True, kw_only=True)
class Tune:
    kept_in_search: int
    """Levers that the search kept, whatever proof and last comparison said."""
    kept: int
    """Levers of the plan."""
    trials: int
    seconds: float


def one(budget_seconds: float) -> Tune:
    target = Target(path=str(SCRIPT), arguments=("--wasted", "0"))
    result = tune_script(TuneRequest(target=target, budget_seconds=budget_seconds, levers=LEVERS), detect())
    trials = result.state.trials
    taken_back = sum("in the search, but the whole" in trial.reason for trial in trials)
    kept = len(result.plan.choices())
    return Tune(kept_in_search=kept + taken_back, kept=kept, trials=len(trials), seconds=result.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunes", type=int, default=100)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of each")
    parser.add_argument("--beside", type=int, default=0, help="processes that keep the machine busy")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(arguments.beside)]
    tunes = _tunes_in(arguments.out, arguments.budget, arguments.beside)
    try:
        while len(tunes) < arguments.tunes:
            tunes.append(one(arguments.budget))
            if arguments.out:
                _write(arguments.out, tunes, arguments.budget, arguments.beside)
    finally:
        for process in busy:
            process.kill()
    trials, in_search = sum(tune.trials for tune in tunes), sum(tune.kept_in_search for tune in tunes)
    print(
        f"{sum(tune.kept > 0 for tune in tunes)} of {len(tunes)} tunes of five levers that do nothing end with a plan; "
        f"of their {trials} trials the search kept {in_search}"
    )
    return 0


def _tunes_in(path: Path | None, budget_seconds: float, beside: int) -> list[Tune]:
    if path is None or not path.exists():
        return []
    known = json.loads(path.read_text())
    if (known["budget_seconds"], known["beside"]) != (budget_seconds, beside):
        raise SystemExit(f"{path}: its tunes had {known['budget_seconds']} s, beside {known['beside']} processes")
    return [Tune(**one) for one in known["tunes"]]


def _write(path: Path, tunes: list[Tune], budget_seconds: float, beside: int) -> None:
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "budget_seconds": budget_seconds,
        "beside": beside,
        "tunes": [asdict(tune) for tune in tunes],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
