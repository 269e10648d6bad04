"""docs/terminal.svg: `flatout tune` and `flatout run` in a terminal, as they really came out.

    python -m docs.record [--budget 60] [--script examples/digits_mlp.py]

Needs pyte, which interprets what a terminal would have shown (`pip install -e '.[docs]'`).
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from fcntl import ioctl
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 170, 60
FIRST, LAST = 4, 14
"""Lines that are shown of what a command printed, where it is long."""
LONG = 40
OUT = Path(__file__).with_name("terminal.svg")


def in_a_terminal(words: list[str], cache: str) -> list[str]:
    """The lines that are on the screen when the command has ended. cache: the folder of Flatout's own files."""
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=2000)
    stream = pyte.ByteStream(screen)
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "FLATOUT_CACHE_DIR": cache}
    child = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    while True:
        try:
            shown = os.read(leader, 65536)
        except OSError:  # the terminal's last user has ended
            break
        if not shown:
            break
        stream.feed(shown)
    child.wait()
    above = ["".join(line[column].data for column in range(COLUMNS)) for line in screen.history.top]
    here = f"{os.getcwd()}{os.sep}"  # private
    return [line.rstrip().replace(here, "") for line in (*above, *screen.display)]


def _shortened(lines: list[str]) -> list[str]:
    shown = "\n".join(lines).strip("\n").splitlines()
    return shown if len(shown) <= LONG else [*shown[:FIRST], "...", *shown[-LAST:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60", help="of flatout tune")
    parser.add_argument("--script", default="examples/digits_mlp.py")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--text", type=Path, help="also as text, here")
    arguments = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory(prefix="flatout-record-") as cache:  # as on first use: no earlier tunes
        for words in (["tune", "--budget", arguments.budget, arguments.script], ["run", arguments.script]):
            console.print(Text(f"$ flatout {' '.join(words)}", style="bold"))
            lines = in_a_terminal([sys.executable, "-m", "flatout", *words], cache)
            console.print(Text("\n".join(_shortened(lines)) + "\n"))
    if arguments.text:
        arguments.text.write_text(console.export_text(clear=False))
    console.save_svg(str(arguments.out), title="flatout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
