"""flatout report: one HTML page of the documents that other commands wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE.json", help="What tune, run, profile or memory wrote about one script (or tune about a step)."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="Where to write the page.")] = Path("report.html"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in your browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Make one HTML page of results: it needs no network, runs no script and can be sent to others.

    It shows the verdict, before and after, where a step's time goes, memory and what holds it, the roofline, findings
    with their lines of code, what was tried, the machine, and how to reproduce it, as far as the documents say.
    """
    import webbrowser

    from flatout.report.document import document, read_document, to_text
    from flatout.report.html.page import report_html
    from flatout.units import format_bytes
    from flatout.whole_files import PRIVATE, check_no_input, errors_named, written_whole

    page = report_html([(path, read_document(path)) for path in files]).encode()
    check_no_input(out, files, "the page")
    with errors_named(out, "name another location with --out"), written_whole(out, mode=PRIVATE) as temporary:
        temporary.write_bytes(page)
    if json:
        print(to_text(document("report", {"page": str(out), "size_bytes": len(page)})))
    else:
        print(f"{out}, {format_bytes(len(page))}")
    if show:
        webbrowser.open(out.absolute().as_uri())
    return 0
