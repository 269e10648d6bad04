"""flatout bench: fixed workloads beside the peers, and the guides' claims, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli.shared_options import DeviceOption, check_place
from flatout.cli.streams import progress_line
from flatout.errors import UsageError
from flatout.report.document import document, read_document, to_text, write_document
from flatout.terminal import printable

if TYPE_CHECKING:
    from flatout.bench.claim import Claim
    from flatout.bench.workload import Setup, Workload

Progress = Callable[[str], None]

KINDS = ("table", "claims", "show")
TUNE_SECONDS, QUICK_TUNE_SECONDS = 300.0, 45.0
CASE_SECONDS, QUICK_CASE_SECONDS = 8.0, 1.5
ROUNDS, QUICK_ROUNDS, QUICK_MOST_SECONDS = 12, 6, 8.0


def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[table|claims|show FILE...]",
            help="table (default): the workloads; claims: what the guides state; show: results that were saved.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these workloads or claims: names, or how they begin, with commas."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds and settings, on a CPU smaller batches: the table in minutes.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", help="Turns of each contender; default: 12 (6 if quick).")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="For tuning each training workload: '90s', '10m'; default: 5m (45s if quick)."
        ),
    ] = None,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Save everything that was measured.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Measure fixed workloads on this machine, beside plain torch and the peers that are installed.

    Contenders take turns, each in a process of its own; peers at their fastest of several settings. With 'claims':
    every figure that popular guides on PyTorch state, and whether it holds here. Ctrl-C ends it early, with what was
    measured until then. Exit code: 0; 1 if nothing could be measured; 2 a name or a file cannot be used.
    """
    kind, files = _kind(what or [])
    given = {"--only": only, "--quick": quick, "--rounds": rounds, "--budget": budget, "--device": device}
    _check_options(kind, {**given, "--out": out, "--json": json})
    if kind == "show":
        return _show(files)
    if files:
        raise UsageError(f"{files[0]!r} after {kind!r}", limit="only 'show' takes files")
    if rounds is not None and rounds < 1:
        raise UsageError(f"--rounds {rounds}", limit="at least 1 is needed", remedy="6 or more give an interval")
    setup = _setup(device, quick=quick)
    with progress_line() as progress:
        if kind == "table":
            saved, text, measured = _table(_workloads(only, quick=quick), setup, rounds, budget, progress)
        else:
            saved, text, measured = _claims(_claims_named(only), setup, progress)
    print(to_text(saved) if json else text)
    if out is not None:
        write_document(out, saved)
    return 0 if measured else 1


def _check_options(kind: str, given: dict[str, object]) -> None:
    """UsageError, before minutes of work, for one that would be ignored, and for a file that cannot be written."""
    asked = [name for name, value in given.items() if value not in (None, False)]
    if kind == "show" and asked:
        raise UsageError(f"{asked[0]} with show", limit="it prints saved results", remedy=f"leave {asked[0]} out")
    if kind == "claims" and (stray := [name for name in ("--rounds", "--budget") if name in asked]):
        raise UsageError(f"{stray[0]} is for the table", limit="claims have a fixed time for each case")
    if isinstance(out := given["--out"], Path):
        check_place(out)


def _kind(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """(what is wanted, the files after it)"""
    if not words:
        return "table", ()
    if words[0] not in KINDS:
        raise UsageError(f"{words[0]!r}", limit=f"it is one of {', '.join(KINDS)}", remedy="see: flatout bench --help")
    if words[0] == "show" and len(words) == 1:
        raise UsageError("nothing to show", remedy="name what `flatout bench --out FILE.json` wrote")
    return words[0], words[1:]


def _setup(device: str | None, *, quick: bool) -> Setup:
    from flatout.bench.workload import Setup
    from flatout.machine.visible_devices import show_only
    from flatout.train.placement import device as usual_device

    show_only(device)
    return Setup(device="cpu" if device == "cpu" else usual_device().type, quick=quick)


def _workloads(only: str | None, *, quick: bool) -> list[Workload]:
    from flatout.bench.table import QUICK, WORKLOADS

    if only is None:
        return [one for key, one in WORKLOADS.items() if key in QUICK or not quick]
    return [WORKLOADS[key] for key in _matching(only, list(WORKLOADS))]


def _claims_named(only: str | None) -> list[Claim]:
    from flatout.bench.claims import CLAIMS

    if only is None:
        return list(CLAIMS)
    chosen = _matching(only, [claim.key for claim in CLAIMS])
    return [claim for claim in CLAIMS if claim.key in chosen]


def _matching(only: str, every: Sequence[str]) -> list[str]:
    """Of `every`, in its order, those that begin with one of the names."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    wrong = [name for name in names if not any(one.startswith(name) for one in every)]
    if wrong or not names:
        raise UsageError(f"--only {', '.join(wrong) or only!r}", limit=f"there are {', '.join(every)}")
    return [one for one in every if any(one.startswith(name) for name in names)]


def _table(
    workloads: Sequence[Workload], setup: Setup, rounds: int | None, budget: str | None, progress: Progress
) -> tuple[dict[str, object], str, bool]:
    """(document, text, whether there is any row)"""
    from flatout.bench.table import Effort, measure_table
    from flatout.report.bench_text import bench_text
    from flatout.units import parse_positive_seconds

    usual = QUICK_TUNE_SECONDS if setup.quick else TUNE_SECONDS
    effort = Effort(
        rounds=rounds or (QUICK_ROUNDS if setup.quick else ROUNDS),
        tune_seconds=usual if budget is None else parse_positive_seconds(budget, "--budget"),
        most_seconds=QUICK_MOST_SECONDS if setup.quick else float("inf"),
    )
    found = measure_table(workloads, setup, effort, progress)
    saved = document("bench", found.to_json(), include_private=False)
    return saved, bench_text(found), any(one.rows for one in found.workloads)


def _claims(claims: Sequence[Claim], setup: Setup, progress: Progress) -> tuple[dict[str, object], str, bool]:
    """(document, text, whether any claim was measured)"""
    from flatout.bench.claims import measure_claims
    from flatout.report.bench_text import claims_text

    seconds = QUICK_CASE_SECONDS if setup.quick else CASE_SECONDS
    found = measure_claims(claims, setup, seconds, progress)
    saved = document("bench-claims", found.to_json(), include_private=False)
    return saved, claims_text(found), any(one.cases for one in found.claims)


def _show(files: Sequence[str]) -> int:
    from flatout.bench.claim import ClaimsResult
    from flatout.bench.results import BenchResult
    from flatout.report.bench_text import bench_text, claims_text

    for file in files:
        doc = read_document(Path(file))
        kind = doc["flatout"].get("document")
        payload = {name: value for name, value in doc.items() if name != "flatout"}
        try:
            if kind == "bench":
                text = bench_text(BenchResult.from_json(payload))
            elif kind == "bench-claims":
                text = claims_text(ClaimsResult.from_json(payload))
            else:
                raise UsageError(f"{file} is a {kind!r} document", limit="show takes what `flatout bench --out` wrote")
        except TypeError as error:
            raise UsageError(f"{file} cannot be read ({error})", remedy="measure it again with this Flatout") from None
        print("\n".join(map(printable, text.splitlines())))
    return 0
