"""Can the proof be fooled? Wrong levers that it must catch, right ones that it must accept.

    python -m benchmarks.proof                      # every wrong lever on two scripts, every right one; 40 minutes
    python -m benchmarks.proof --sample 8           # that many wrong levers on all scripts, drawn by --seed
    python -m benchmarks.proof --only "momentum"    # those whose name contains it
    python -m benchmarks.proof --repeats rounding   # on scripts whose gradients differ by rounding from run to run

A wrong lever is caught if it is not accepted at what it claims, 'rounding' or 'reduced': one run tells about both, as
the proof of a 'reduced' lever looks first whether it is within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.proof import right_levers, wrong_levers
from flatout.levers.lever import Choice
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning.prover import Pattern, Prover
from flatout.tuning.results import Proof

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEP_SECONDS = 1.5e-3
EPOCH_STEPS = {"mlp_epochs": 20, "cnn_schedule": 16, "bf16_already": 15, "two_optimizers": 18, "own_updates": 20}
PROOF_SECONDS = 24 * 3600.0
"""For all levers of one script: each gets the runs that it asks for, whichever came before it."""
CLAIMS = ("rounding", "reduced")
"""Of wrong levers. One that claims 'bit-identical' is compared bit by bit: nothing that changes anything passes."""
REPEATS = ("seeded", "unseeded", "rounding")
"""How a script is run: with its seeds, without, or with them and gradients whose additions have no fixed order."""
ACCEPTED = {
    "bit-identical": ("bit-identical", "within rounding"),
    "rounding": ("bit-identical", "within rounding"),
    "reduced": ("bit-identical", "within rounding", "reduced"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    lever: str
    value: Any
    claim: str
    script: str
    repeats: str
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    verdict: str
    reason: str
    seconds: float

    def accepted(self, claim: str) -> bool:
        """As one that makes this claim; where plain runs differ by rounding, nothing can be bit-identical."""
        if claim == "bit-identical" and self.case.repeats != "rounding":
            return self.verdict == "bit-identical"
        return self.verdict in ACCEPTED[claim]

    def caught(self, claim: str) -> bool:
        return not self.accepted(claim)

    def excused(self, claim: str) -> bool:
        """Was it said beforehand that a wrong lever may pass with this claim?"""
        return (self.case.lever, claim) in wrong_levers.NOT_DETECTABLE

    @property
    def as_it_should(self) -> bool:
        if not self.case.wrong:
            return self.accepted(self.case.claim)
        return all(self.caught(claim) or self.excused(claim) for claim in CLAIMS)


def wrong_cases(draw: random.Random, on: int, sample: int | None, repeats: Sequence[str]) -> list[Case]:
    """Each fault on `on` scripts of those on which it does something; or a sample of the faults on all of them."""
    faults = list(wrong_levers.FAULTS)
    if sample is not None:
        faults, on = draw.sample(faults, min(sample, len(faults))), len(wrong_levers.EVERY)
    return [
        Case(
            lever=name,
            value=True,
            claim="reduced",
            script=script,
            repeats=draw.choice(repeats),
            wrong=True,
        )
        for name, _, scripts in faults
        for script in draw.sample(scripts, min(on, len(scripts)))
    ]


def right_cases(repeats: Sequence[str]) -> list[Case]:
    claims = {lever.name: lever.exactness for lever in right_levers.LEVERS}
    return [
        Case(lever=name, value=value, claim=claims[name], script=script, repeats=how, wrong=False)
        for how in repeats
        for name, value, script in right_levers.RIGHT
    ]


def run(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Cases of one script share its plain runs."""
    groups: dict[tuple[bool, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.wrong, case.script, case.repeats), []).append(case)
    for (wrong, script, repeats), members in groups.items():
        module = wrong_levers if wrong else right_levers
        levers = {lever.name: lever for lever in module.LEVERS}
        with (
            tempfile.TemporaryDirectory(prefix="flatout-proof-", dir="/var/tmp") as folder,
            _prover(Path(folder), module.__name__, script, repeats) as prover,
        ):
            for case in members:
                began = time.monotonic()
                proof = _proved(prover, Choice(levers[case.lever], case.value))
                yield Outcome(case=case, verdict=proof.verdict, reason=proof.reason, seconds=time.monotonic() - began)


def _proved(prover: Prover, choice: Choice) -> Proof:
    return prover.prove([choice])


def _prover(folder: Path, levers: str, script: str, repeats: str) -> Prover:
    path = str(HERE / "scripts" / f"{script}.py")
    targets = {
        "seeded": Target(path=path),
        "unseeded": Target(path=path, arguments=("--unseeded",)),
        "rounding": Target(path=str(HERE / "out_of_order.py"), arguments=(path,)),
    }
    setup = TrialSetup(
        target=targets[repeats],
        work_folder=folder,
        levers=f"{levers}:LEVERS",
    )
    pattern = Pattern(step_seconds=STEP_SECONDS, epoch_steps=EPOCH_STEPS.get(script))
    return Prover(setup, pattern, Deadline(PROOF_SECONDS))


def summary(outcomes: Sequence[Outcome]) -> dict[str, str]:
    found: dict[str, str] = {}
    wrong = [one for one in outcomes if one.case.wrong]
    for claim in CLAIMS:
        counted = [one for one in wrong if not one.excused(claim)]
        for name, chosen in _by_repeats(counted):
            found[f"wrong, {claim}, {name}"] = f"{sum(one.caught(claim) for one in chosen)} of {len(chosen)} caught"
    for name, chosen in _by_repeats([one for one in outcomes if not one.case.wrong]):
        found[f"right, {name}"] = f"{sum(one.as_it_should for one in chosen)} of {len(chosen)} accepted"
    return found


def _by_repeats(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    groups = [(name, [one for one in outcomes if one.case.repeats == name]) for name in REPEATS]
    return [(name, chosen) for name, chosen in groups if chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("wrong", "right", "both"), default="both")
    parser.add_argument("--scripts", type=int, default=2, help="scripts for each wrong lever")
    parser.add_argument("--sample", type=int, help="the number of wrong levers, on all scripts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw of scripts and sample")
    parser.add_argument("--repeats", nargs="+", choices=REPEATS, default=REPEATS[:2], help="how scripts are run")
    parser.add_argument("--only", default="", help="levers whose name contains this")
    parser.add_argument("--on", nargs="+", help="only these scripts")
    parser.add_argument("--out", type=Path, help="a JSON file for everything")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for trials
    draw = random.Random(arguments.seed)
    cases = []
    if arguments.kind != "right":
        cases += wrong_cases(draw, arguments.scripts, arguments.sample, arguments.repeats)
    cases += right_cases(arguments.repeats) if arguments.kind != "wrong" and arguments.sample is None else []
    cases = [case for case in cases if arguments.only in case.lever and case.script in (arguments.on or [case.script])]
    if not cases:
        parser.error(f"no lever matches --only {arguments.only!r} and --on {arguments.on}")
    outcomes: list[Outcome] = []
    for outcome in run(cases):
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        if arguments.out:
            _write(arguments.out, outcomes)
    print("\n".join(f"{name:28} {rate}" for name, rate in summary(outcomes).items()))
    return 0 if all(one.as_it_should for one in outcomes) else 1


def _line(outcome: Outcome) -> str:
    case = outcome.case
    told = case.lever if case.wrong else f"{case.lever} = {case.value}"
    where = case.script if case.repeats == "seeded" else f"{case.script}, {case.repeats}"
    mark = "  " if outcome.as_it_should else "!!"
    return f"{mark} {told:55} {where:28} {outcome.verdict:16} {outcome.reason}"


def _write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """After every case: such a run takes half an hour, and may be ended before."""
    machine = detect()
    document = {
        "machine": {"processor": machine.cpu.name, "torch": machine.versions.torch},
        "arguments": " ".join(sys.argv[1:]),
        "rates": summary(outcomes),
        "outcomes": [asdict(one) for one in outcomes],
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
