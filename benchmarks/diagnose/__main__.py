"""`python -m benchmarks.diagnose --out FILE`: does `flatout profile` find what is wrong with a script, and only that?

Every faulty script of the corpus must get a finding of its subject, at a marked line, with the cost that its corrected
version saves. Corrected versions and scripts that only look suspicious must get none. What FILE holds already is not
run again, unless the script has changed.

    python -m benchmarks.diagnose --repeats 2 --out FILE            # every script twice
    python -m benchmarks.diagnose --repeats 1 --loaded --out FILE   # and once more beside a busy process
    python -m benchmarks.diagnose --plain                           # only: does each script run, and how long?
    python -m benchmarks.diagnose --held-out --out FILE             # the scripts of held_out/ instead
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.diagnose import catalogue, running, scoring
from benchmarks.diagnose.catalogue import Script
from flatout.machine.detect import detect

SCHEMA = "flatout-diagnose-1"
PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "traceml-ai")

Asked = Callable[[], dict[str, Any]]


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: the goals are reached; 1: they are not, or a script fails; 2: nothing could be run."""
    arguments = parse_arguments(words)
    gpu = bool(detect().devices)
    scripts = catalogue.scripts(catalogue.HELD_OUT if arguments.held_out else catalogue.CORPUS)
    chosen = [one for one in scripts if _wanted(one, arguments.only)]
    here = [one for one in chosen if one.why_not_here(gpu) is None]
    left_out = {one.name: reason for one in chosen if (reason := one.why_not_here(gpu))}
    for name, reason in left_out.items():
        print(f"{name:48} left out: {reason}")
    if not here:
        return 2
    if arguments.plain:
        return 1 if [one for one in here if not _runs(one)] else 0
    notes = Notes(arguments.out)
    with running.second_process_busy(arguments.loaded):
        for repeat in range(arguments.repeats):
            with ThreadPoolExecutor(arguments.side_by_side) as pool:
                list(pool.map(lambda script, repeat=repeat: _ask(notes, script, repeat, arguments), here))
    if not arguments.loaded and not arguments.untimed:
        for pair in _pairs(here):
            _time(notes, pair, arguments.pairs)
    scores, peer = _scores(notes, scripts), _peer_score(notes, scripts)
    made = {name: one.to_json() for name, one in scores.items()}
    notes.save({"left_out": left_out, "scores": made, "peer": peer and peer.to_json()})
    for device, found in scores.items():
        print(summary(device, found))
    if peer is not None:
        print(
            f"\ntraceml: saw steps in {peer.saw_steps} scripts, named the area of {peer.right_area} faults, left "
            f"{peer.quiet} healthy scripts alone"
        )
    return 0 if all(one.reaches_goals for one in scores.values()) else 1


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="read what is there, add to it, write everything as JSON")
    parser.add_argument("--repeats", type=int, default=3, help="how often each script is asked (default: %(default)s)")
    parser.add_argument("--loaded", action="store_true", help="a second process keeps a core busy meanwhile")
    parser.add_argument("--held-out", action="store_true", help="the scripts in held_out/ instead of the corpus")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="a script, a pair, a subject, or a device")
    parser.add_argument(
        "--side-by-side", type=int, default=1, metavar="N", help="scripts asked at once; costs suffer (default: 1)"
    )
    parser.add_argument("--pairs", type=int, default=5, help="runs of each version to measure a gain (default: 5)")
    parser.add_argument("--untimed", action="store_true", help="measure no gains")
    parser.add_argument("--plain", action="store_true", help="only run each script, without Flatout")
    parser.add_argument("--peer", choices=["traceml"], help="also ask the peer, once for each script")
    parser.add_argument("--flatout", default=f"{shlex.quote(sys.executable)} -m flatout", help="the command to test")
    parser.add_argument("--traceml", default="traceml", help="the peer's command, from an environment of its own")
    return parser.parse_args(words)


def _wanted(script: Script, only: Sequence[str] | None) -> bool:
    return only is None or bool({script.name, script.pair, script.subject, script.device} & set(only))


class Notes:
    """What was asked and measured so far, in memory and in the file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        held = json.loads(path.read_text()) if path is not None and path.exists() else {}
        if held and held.get("schema") != SCHEMA:
            raise SystemExit(f"{path} is no {SCHEMA} document: name another file")
        self.entries: dict[str, dict[str, Any]] = held.get("entries", {})
        self._lock = threading.Lock()
        self.header = {"schema": SCHEMA, "machine": detect().to_json(), "versions": _versions()}

    def once(self, key: str, fingerprint: str, make: Asked) -> dict[str, Any]:
        """The entry under the key, made now if there is none for this text of the script, or only an error."""
        held = self.entries.get(key)
        if held is None or held["fingerprint"] != fingerprint or held.get("error"):
            held = {"fingerprint": fingerprint, **make()}
            with self._lock:
                self.entries[key] = held
                self.save({})
        return held

    def save(self, more: Mapping[str, Any]) -> None:
        """After every script: a benchmark of hours must not lose everything at its end."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.header, **more, "entries": self.entries}, indent=1) + "\n")


def _versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def _runs(script: Script) -> bool:
    times = running.time_steps(script)
    training = "unknown" if times.seconds is None else f"{times.seconds:.2f} s"
    steps = f"{times.steps} steps" + ("" if times.steps == script.steps else f", not {script.steps}")
    print(f"{script.name:48} {times.whole_seconds:6.2f} s, training {training}, {steps} {times.error}", flush=True)
    return not times.error


def _ask(notes: Notes, script: Script, repeat: int, arguments: argparse.Namespace) -> None:
    def make() -> dict[str, Any]:
        done, document = running.ask(script, shlex.split(arguments.flatout))
        found = None if document is None else document.get("findings")
        missing = done.error or ("no document" if document is None else "a document without findings")
        entry = {"seconds": done.seconds, "findings": found, "error": missing if found is None else ""}
        print(_line(script, entry), flush=True)
        return entry

    notes.once(_key(script, repeat, arguments.loaded), script.fingerprint, make)
    if arguments.peer and repeat == 0:
        notes.once(f"peer {script.name}", script.fingerprint, lambda: running.ask_peer(script, arguments.traceml))


def _key(script: Script, repeat: int, loaded: bool) -> str:
    return f"{'loaded' if loaded else 'asked'} {script.name} {repeat}"


def _line(script: Script, entry: Mapping[str, Any]) -> str:
    outcome = _outcome(script, entry)
    if entry["findings"] is None:
        return f"NO ANSWER   {script.name:48} {entry['seconds']:6.1f} s, {entry['error']}"
    if outcome.found is None:
        verdict = "accused" if outcome.alarms else "quiet"
    else:
        verdict = ("right line" if outcome.line_right else "wrong line") if outcome.found else "MISSED"
    others = f", also {', '.join(outcome.alarms)}" if outcome.alarms else ""
    return f"{verdict:11} {script.name:48} {entry['seconds']:6.1f} s{others}"


def _outcome(script: Script, entry: Mapping[str, Any]) -> scoring.Outcome:
    if entry["findings"] is None:
        return scoring.no_answer(script)
    return scoring.judge(script, scoring.read_findings(entry))


def _pairs(scripts: Sequence[Script]) -> list[tuple[Script, Script]]:
    """(faulty, healthy), of those that are faster when fixed."""
    by_name = {one.name: one for one in scripts}
    faulty = [one for one in scripts if one.role == "faulty" and one.faster_when_fixed]
    return [(one, by_name[f"{one.pair}/healthy"]) for one in faulty if f"{one.pair}/healthy" in by_name]


def _time(notes: Notes, pair: tuple[Script, Script], count: int) -> None:
    faulty, healthy = pair

    def make() -> dict[str, Any]:
        taken: dict[str, list[running.Times]] = {faulty.name: [], healthy.name: []}
        for number in range(count):
            for script in (faulty, healthy) if number % 2 == 0 else (healthy, faulty):
                taken[script.name].append(running.time_steps(script))
        before, after = ([one.seconds for one in taken[script.name]] for script in (faulty, healthy))
        known = None not in before and None not in after
        gain = scoring.gain_share(before, after) if known else None  # type: ignore[arg-type]
        print(f"{faulty.pair:48} {'gain unknown' if gain is None else f'the fix saves {gain:.1%}'}", flush=True)
        samples = {name: [asdict(one) for one in times] for name, times in taken.items()}
        errors = [one.error for times in taken.values() for one in times if one.error]
        return {"gain_share": gain, "samples": samples, "error": errors[0] if errors else ""}

    notes.once(f"gain {faulty.pair}", _both(faulty, healthy), make)


def _scores(notes: Notes, scripts: Sequence[Script]) -> dict[str, scoring.Score]:
    """By device, of everything that the notes hold about the scripts as they are now."""
    outcomes: dict[str, dict[str, list[scoring.Outcome]]] = {}
    for script in scripts:
        entries = [notes.entries[key] for key in notes.entries if key.split(" ")[:2] in _asked(script)]
        known = [_outcome(script, entry) for entry in entries if entry["fingerprint"] == script.fingerprint]
        if known:
            outcomes.setdefault(script.device, {})[script.name] = known
    gains = {}
    for faulty, healthy in _pairs(scripts):
        entry = notes.entries.get(f"gain {faulty.pair}", {})
        if entry.get("fingerprint") == _both(faulty, healthy) and entry["gain_share"] is not None:
            gains[faulty.pair] = entry["gain_share"]
    return {device: scoring.score(made, gains) for device, made in outcomes.items()}


def _asked(script: Script) -> list[list[str]]:
    return [["asked", script.name], ["loaded", script.name]]


def _both(faulty: Script, healthy: Script) -> str:
    return f"{faulty.fingerprint} {healthy.fingerprint}"


def _peer_score(notes: Notes, scripts: Sequence[Script]) -> scoring.PeerScore | None:
    entries = {one.name: (one, notes.entries.get(f"peer {one.name}")) for one in scripts}
    said = {name: (one, entry) for name, (one, entry) in entries.items() if entry is not None}
    return scoring.score_peer(said) if said else None


def summary(device: str, made: scoring.Score) -> str:
    """For a terminal."""
    rows = {
        "faults found": made.recall,
        "under their own name": made.exactly,
        "at the right line": made.lines,
        "healthy scripts left alone": made.quiet,
        "faulty ones accused of nothing else": made.extra,
        "costs within 25 % or 2 % of a step": made.costs,
    }
    lines = [f"\n{device}:"]
    for name, rate in rows.items():
        lines.append(f"  {name:36} {rate}")
        lines += [f"      not {one}" for one in rate.wrong]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
