"""`python -m benchmarks.scripts`: run public scripts plainly, watched, tuned and under a peer. See README.md."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.scripts import faithfulness, peer, tuning
from benchmarks.scripts.catalogue import PUBLIC_SCRIPTS, PublicScript
from benchmarks.scripts.workspace import find_checkout, split_command
from flatout.machine.detect import detect

SCHEMA = "flatout-public-scripts-1"

Bench = Callable[[PublicScript, Path], dict[str, Any]]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts", description=__doc__)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with the clones, as README.md lists them")
    parser.add_argument("--only", nargs="+", choices=[script.name for script in PUBLIC_SCRIPTS], metavar="NAME")
    parser.add_argument("--overhead", action="store_true", help="plain and `flatout run` in turns: the same, as fast?")
    parser.add_argument("--tune", action="store_true", help="`flatout tune`: how much faster, and still right?")
    parser.add_argument("--peer", choices=["traceml"], help="what the peer reports")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of runs for --overhead (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=240, help="seconds for each --tune (default: %(default)s)")
    parser.add_argument("--flatout", default="{python} -m flatout", help="the command to test (default: %(default)s)")
    parser.add_argument("--traceml", default="traceml", help="the peer's command, from an environment of its own")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    if not (arguments.overhead or arguments.tune or arguments.peer):
        parser.error("nothing to do: pass --overhead, --tune or --peer")
    return arguments


def what_is_missing(script: PublicScript, checkouts: Path) -> str | None:
    """Why a script cannot be run here; None if it can."""
    if find_checkout(script, checkouts) is None:
        return f"no {script.directory}/{script.argv[0]} in {checkouts / script.checkout_name}"
    for package in script.packages:
        try:
            version(package)
        except PackageNotFoundError:
            return f"it needs the package {package}"
    return None


def show_progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def chosen_benches(arguments: argparse.Namespace) -> dict[str, Bench]:
    """By the name under which the results go into the document."""
    flatout = split_command(arguments.flatout)

    def overhead(script: PublicScript, checkout: Path) -> dict[str, Any]:
        result = faithfulness.check_faithfulness(script, checkout, flatout, arguments.rounds, show_progress)
        print(faithfulness.describe(result), flush=True)
        return {**asdict(result), "overhead": result.overhead, "holds": result.holds}

    def tune(script: PublicScript, checkout: Path) -> dict[str, Any]:
        result = tuning.tune_script(script, checkout, flatout, arguments.budget, show_progress)
        print(tuning.describe(result), flush=True)
        verdicts = {"broken": result.broken, "slower": result.slower, "reaches_goal": result.reaches_goal}
        return {**asdict(result), **verdicts}

    def ask_peer(script: PublicScript, checkout: Path) -> dict[str, Any]:
        said = peer.run_peer(script, checkout, arguments.traceml, show_progress)
        print(peer.describe(said), flush=True)
        return asdict(said)

    benches = {"overhead": overhead, "tune": tune, "peer": ask_peer}
    wanted = {"overhead": arguments.overhead, "tune": arguments.tune, "peer": arguments.peer}
    return {name: bench for name, bench in benches.items() if wanted[name]}


def save(path: Path | None, document: dict[str, Any]) -> None:
    """After every script: a benchmark of hours must not lose everything at its end."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def falls_short(document: dict[str, Any]) -> bool:
    overhead = any(not entry["holds"] for entry in document.get("overhead", ()))
    tune = any(entry["broken"] or entry["slower"] or not entry["reaches_goal"] for entry in document.get("tune", ()))
    return overhead or tune


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: everything promised holds; 1: something falls short; 2: nothing could be run."""
    arguments = parse_arguments(words)
    scripts = [script for script in PUBLIC_SCRIPTS if arguments.only is None or script.name in arguments.only]
    missing = {script.name: what_is_missing(script, arguments.checkouts) for script in scripts}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": detect().to_json(),
        "left_out": {name: reason for name, reason in missing.items() if reason},
    }
    for name, reason in document["left_out"].items():
        print(f"{name:22} left out: {reason}")
    runnable = [script for script in scripts if missing[script.name] is None]
    for kind, bench in chosen_benches(arguments).items():
        document[kind] = []
        for script in runnable:
            checkout = find_checkout(script, arguments.checkouts)
            assert checkout is not None
            document[kind].append(bench(script, checkout))
            save(arguments.out, document)
    if not runnable:
        return 2
    return 1 if falls_short(document) else 0


if __name__ == "__main__":
    sys.exit(main())
