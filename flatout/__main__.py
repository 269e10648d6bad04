"""`flatout VERB ...` and `python -m flatout VERB ...`: pick the verb, turn our exceptions into exit codes.

`flatout run` runs the user's script in this same process, so nothing is imported before it that the script did not ask
for: neither typer nor torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from flatout.errors import FlatoutError
from flatout.terminal import discard, harmless, tell

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""
READER_GONE = 141
"""Exit code when the reader of our output went away (`flatout check | head -1`): 128 + SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Exceptions of a script under `flatout run` are reported by the run verb."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments[1:]) if arguments[:1] == ["run"] else _verb(arguments)
    except FlatoutError as error:
        tell(f"error: {harmless(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        if arguments[:1] == ["run"]:
            raise  # as the script alone would end: Python shuts down, and is killed by the signal
        tell("interrupted")
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    """Import our modules from this package, not from the folder that `python -m flatout` was started in."""
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    import flatout.cli.run as run
    from flatout.cli.command_line import asks_for_help

    if asks_for_help(arguments, run.OPTIONS):
        return _verb(["run", "--help"])
    return run.main(arguments)


def _verb(arguments: list[str]) -> int:
    from flatout.cli.main import main as dispatch

    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is printed as an escape
            sys.stdout.reconfigure(errors="backslashreplace")
        return dispatch(arguments)
    except BrokenPipeError:
        discard(sys.stdout)
        return READER_GONE


if __name__ == "__main__":
    sys.exit(main())
