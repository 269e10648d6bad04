"""flatout compare: is the second result faster than the first?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(metavar="BASELINE.json", help="What `flatout run` wrote first.")],
    b: Annotated[Path, typer.Argument(metavar="CANDIDATE.json", help="What it wrote after a change.")],
    fail_if_slower: Annotated[
        bool, typer.Option("--fail-if-slower", help="Exit with 1 if the candidate is significantly slower.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Compare two results: is the second faster, slower, or not significantly different?

    Exit code: 0 compared, 1 slower (with --fail-if-slower), 2 they cannot be compared (different machines, or files
    that are not results).
    """
    from flatout.report.compare import compare_documents, comparison_text
    from flatout.report.document import document, read_document, to_text

    found = compare_documents(read_document(a), read_document(b))
    print(to_text(document("comparison", found.to_json())) if json else comparison_text(found))
    return 1 if fail_if_slower and found.comparison.verdict == "slower" else 0
