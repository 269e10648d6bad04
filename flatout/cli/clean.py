"""flatout clean: list and remove what Flatout has left on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.errors import UsageError
from flatout.terminal import is_terminal
from flatout.units import format_bytes

if TYPE_CHECKING:
    from flatout.script.leftovers import Cleaned, Leftover


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it without asking.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Remove caches, compiled kernels, measured ceilings, tuning history and leftovers of killed processes.

    Plans and reports stay. Exit code: 0 fine, 1 something could not be removed.
    """
    from flatout.report.document import document, to_text
    from flatout.script.leftovers import Cleaned, find_leftovers, remove_leftovers

    found = find_leftovers()
    asks = bool(found) and not (dry_run or yes)
    if asks and (json or not is_terminal(sys.stdin)):
        raise UsageError(
            "clean asks for confirmation, and there is no terminal to ask on", remedy="pass --yes, or --dry-run to look"
        )
    if not json:
        print(_found_text(found))
    if dry_run or (asks and not typer.confirm("Remove all of it?")):
        cleaned = Cleaned(removed=())
    else:
        cleaned = remove_leftovers(found)
    if json:
        print(to_text(document("clean", {"found": [one.to_json() for one in found], **cleaned.to_json()})))
    elif cleaned.removed or cleaned.failed:
        print(_cleaned_text(cleaned))
    return 1 if cleaned.failed else 0


def _found_text(found: Sequence[Leftover]) -> str:
    """A line for each, and their sum."""
    if not found:
        return "nothing to remove"
    lines = [f"{format_bytes(one.size_bytes):>9}  {one.path}  {one.what}" for one in found]
    return "\n".join([*lines, f"{format_bytes(sum(one.size_bytes for one in found)):>9}  in all"])


def _cleaned_text(cleaned: Cleaned) -> str:
    """What is gone, and a line for each that is not."""
    gone = f"removed {format_bytes(sum(one.size_bytes for one in cleaned.removed))}"
    return "\n".join([gone, *(f"not removed: {one.path}: {why}" for one, why in cleaned.failed)])
