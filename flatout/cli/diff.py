"""flatout diff: the plan's changes as a patch of the script's source."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.shared_options import TargetArgument
from flatout.whole_files import check_no_input, errors_named, written_whole


def diff(
    target: TargetArgument,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The plan; default: flatout.toml, if it is for this script.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What the tune measured; default: flatout-report.json beside the plan."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the patch here; default: to stdout.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Patch a script that changed since the tune, or may have.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Show the plan's changes as a patch of the script's source, each with its measured gain. Edits nothing.

    Apply it with `patch -p1` or `git apply`. Exit code: 0 there is a patch, 1 no choice of the plan has a form in this
    source, 2 the script is not the one that was tuned.
    """
    from flatout.application.applied_plan import PLAN_NAME
    from flatout.application.source_patch import REPORT_NAME, patch_of
    from flatout.report.document import to_text
    from flatout.report.source_patch_text import patch_bytes, patch_document
    from flatout.script.entry import Target
    from flatout.script.own_files import own_files

    script = Target.from_command(target)
    found = patch_of(script, plan=plan, report=report, force=force)
    written = patch_bytes(found, script.command)
    if out is not None and found.files:
        place = plan or Path(PLAN_NAME)
        read = [place, report or place.parent / REPORT_NAME, *(file.path for file in own_files(script))]
        check_no_input(out, read, "the patch")
        with errors_named(out, "name a file in a folder that you may write"), written_whole(out) as temporary:
            temporary.write_bytes(written)
    if json:
        print(to_text(patch_document(found, script.command)))
    elif out is None or not found.files:
        _print(written)
    else:
        print(f"saved {out}      next: patch -p1 < {shlex.quote(str(out))}")
    return 0 if found.files else 1


def _print(content: bytes) -> None:
    """Byte for byte: the source may be in any encoding."""
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # a stream of text that a caller put there, or closed (`>&-`)
        print(content.decode("utf-8", "replace"), end="")
    else:
        sys.stdout.flush()
        buffer.write(content)
