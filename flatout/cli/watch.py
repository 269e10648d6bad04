"""flatout watch: what runs are doing, read from the state that each keeps; it changes nothing of theirs."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from flatout import environment
from flatout.terminal import is_terminal

if TYPE_CHECKING:
    from flatout.application.watched_runs import RunWatch

REFRESH_SECONDS = 1.0


def watch(
    run: Annotated[
        str | None, typer.Argument(metavar="[PID|FOLDER]", help="Its process, or the folder of its state.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Show a running script, or list all runs, with this machine's devices and the processes on its GPUs.

    With a run, on a terminal: anew every second until the run has ended or Ctrl-C is pressed. Otherwise once, after a
    second, because rates need two readings of the sensors.
    """
    from flatout.application.watched_runs import RunWatch
    from flatout.report.document import document, to_text
    from flatout.report.live_text import watched_text

    watching = RunWatch(run)
    try:
        watching.read()
        if run is not None and not json and is_terminal(sys.stdout) and environment.terminal_has_cursor():
            return _follow(watching)
        time.sleep(REFRESH_SECONDS)
        found = watching.read()
    finally:
        watching.close()
    print(to_text(document("watch", found.to_json(), include_private=False)) if json else watched_text(found))
    return 0


def _follow(watching: RunWatch) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from flatout.report.live_text import watched_text

    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            found = watching.read()
            live.update(Text(watched_text(found, columns=console.width)), refresh=True)
            if found.over:
                break
            time.sleep(REFRESH_SECONDS)
    return 0
