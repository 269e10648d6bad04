"""flatout clean: list and remove what Flatout has left on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flatout.terminal import is_terminal


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it without asking.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Remove caches, compiled kernels, measured ceilings, tuning history and leftovers of killed tunes.

    Plans and reports stay. Exit code: 0 fine, 1 something could not be removed.
    """
    from flatout.errors import UsageError
    from flatout.report.clean_text import cleaned_text, leftovers_text
    from flatout.report.document import document, to_text
    from flatout.script.leftovers import Cleaned, find_leftovers, remove_leftovers

    found = find_leftovers()
    asks = bool(found) and not (dry_run or yes)
    if asks and (json or not is_terminal(sys.stdin)):
        raise UsageError(
            "clean asks for confirmation, and there is no terminal to ask on", remedy="pass --yes, or --dry-run to look"
        )
    if not json:
        print(leftovers_text(found))
    if dry_run or (asks and not typer.confirm("Remove all of it?")):
        cleaned = Cleaned(removed=())
    else:
        cleaned = remove_leftovers(found)
    if json:
        print(to_text(document("clean", {"found": [one.to_json() for one in found], **cleaned.to_json()})))
    elif cleaned.removed or cleaned.failed:
        print(cleaned_text(cleaned))
    return 1 if cleaned.failed else 0
