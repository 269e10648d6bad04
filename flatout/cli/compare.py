"""flatout compare: is the second result faster than the first? And a gate for CI."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.errors import MachinesDiffer, UsageError

if TYPE_CHECKING:
    from flatout.report.document import Document
    from flatout.report.gate import Gate, OnUndecided

_SIDE = "a file, a folder of files or a quoted pattern ('runs/base-*.json')"


def compare(
    a: Annotated[str, typer.Argument(metavar="BASELINE", help=f"What `flatout run` wrote first: {_SIDE}.")],
    b: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The same, after a change.")],
    fail_if: Annotated[
        Literal["slower"] | None,
        typer.Option("--fail-if", help="Be a gate: exit with 3 if the candidate is slower by more than --threshold."),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="With --fail-if: the smallest slowdown that matters; default: 3%."),
    ] = None,
    on_undecided: Annotated[
        Literal["pass", "fail"] | None,
        typer.Option(help="With --fail-if: whether the gate passes if the runs do not decide; default: fail."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="With --fail-if: write the answer as a JUnit report.")
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="With --fail-if: also print the answer as a GitHub annotation.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Compare two results: is the second faster, slower, or not significantly different?

    With several runs of each side (3 or more) each run counts as one sample, so that the interval covers what differs
    from run to run. Exit code: 0 compared, or not slower; 2 the files or options cannot be used; 5 the machines differ;
    with --fail-if also 3 slower, 4 undecided, as where the runs are of different scripts.
    """
    from flatout.report.compare import compare_sides, comparison_text
    from flatout.report.document import document, read_document, to_text
    from flatout.report.gate import gate_text, judge
    from flatout.units import parse_share
    from flatout.whole_files import check_no_input

    if fail_if is None and (threshold, on_undecided, junit, github) != (None, None, None, False):
        raise UsageError(
            "--threshold, --on-undecided, --junit and --github are options of a gate",
            remedy="pass --fail-if slower too",
        )
    if github and json:
        raise UsageError("--github and --json", limit="--json prints one document and nothing else")
    limit, undecided = parse_share("3%" if threshold is None else threshold), on_undecided or "fail"
    files = _files(a), _files(b)
    baseline, candidate = ([read_document(one) for one in side] for side in files)
    if junit is not None:
        check_no_input(junit, itertools.chain(*files), "the JUnit report", "--junit")
    try:
        found = compare_sides(baseline, candidate)
    except MachinesDiffer as error:
        _publish(candidate, limit, None, str(error), undecided, junit=junit, github=github)
        raise
    gate = judge(found, limit) if fail_if is not None else None
    if json:
        print(to_text(document("comparison", {**found.to_json(), "gate": gate and gate.to_json()})))
    else:
        print("\n".join([*([gate_text(gate)] if gate else []), comparison_text(found)]))
    _publish(candidate, limit, gate, "", undecided, junit=junit, github=github)
    return gate.exit_code(undecided) if gate else 0


def _files(side: str) -> list[Path]:
    """A file, every .json of a folder, or the files that a pattern matches, in the order of their names."""
    import glob
    import os

    path = Path(side)
    if not side:  # as of a variable of a shell that is not set
        raise UsageError("one side is ''", limit=f"it is {_SIDE}")
    if os.path.isdir(side):
        found = sorted(path.glob("*.json"))
    elif os.path.exists(side) or not glob.has_magic(side):
        found = [path]
    else:
        found = sorted(map(Path, glob.glob(side)))
    if not found:
        what = f"no .json file in {side}" if os.path.isdir(side) else f"no file matches {side}"
        raise UsageError(what, remedy="pass what `flatout run --report FILE` wrote")
    return found


def _publish(
    candidate: Sequence[Document],
    threshold: float,
    gate: Gate | None,
    failure: str,
    on_undecided: OnUndecided,
    *,
    junit: Path | None,
    github: bool,
) -> None:
    """Where CI reads it."""
    from flatout.report.compare import script_name
    from flatout.report.gate import github_annotation, junit_xml
    from flatout.whole_files import errors_named, written_whole

    name = script_name(candidate[-1])
    if junit is not None:
        with errors_named(junit, "name another location"), written_whole(junit) as temporary:
            temporary.write_text(junit_xml(name, threshold, gate, failure, on_undecided), encoding="utf-8")
    if github:
        print(github_annotation(name, gate, failure, on_undecided))
